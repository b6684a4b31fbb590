"""Which engine a machine runs when one is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from splitlm.core.engines import ENGINES
from splitlm.core.errors import UsageError
from splitlm.model.compute.products import KINDS


@dataclass(frozen=True)
class Choice:
    """An engine, and why it is not the one that was asked for.

    Attributes:
        name: of the engine.
        why: empty where it is the one that was asked for.
    """

    name: str
    why: str = ""


def need(asked: str) -> None:
    """See that a machine can run an engine, where another in its place would be no answer.

    Raises:
        UsageError: there is no such engine, or it does not work here.
    """
    chosen = choose(asked)
    if chosen.why:
        raise _lacking(asked, chosen.why)


def choose(asked: str) -> Choice:
    """The engine to run: the one asked for where its products work here, else ``exact``.

    Only ``fast`` gives way: who asks for fewer bits is told that they cannot be had.

    Raises:
        UsageError: there is no such engine, or a quantised one does not work here.
    """
    if asked not in ENGINES:
        raise UsageError(f"There is no engine {asked!r}", where="--compute", expected=" or ".join(ENGINES))
    if asked == "exact":
        return Choice(asked)
    why = KINDS[asked].missing()
    if not why:
        return Choice(asked)
    if asked == "fast":
        return Choice("exact", why)
    raise _lacking(asked, why)


def _lacking(asked: str, why: str) -> UsageError:
    return UsageError(
        f"This machine cannot run the engine {asked!r} ({why})",
        where="--compute",
        expected="a processor and a torch that have its products",
        remedy="splitlm doctor shows which engines work here",
    )
