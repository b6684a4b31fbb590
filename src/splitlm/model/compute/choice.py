"""Which engine a machine runs when one is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from splitlm.core.engines import ENGINES
from splitlm.core.errors import UsageError
from splitlm.model.compute.products import KINDS, Kind


@dataclass(frozen=True)
class Choice:
    """An engine, and why it is not the one that was asked for.

    Attributes:
        name: of the engine.
        why: empty where it is the one that was asked for.
        aside: why the best products of this engine do not work here, where others stand in for them.
        kind: how it packs, which was tried; None for ``exact``.
    """

    name: str
    why: str = ""
    aside: str = ""
    kind: Kind | None = None


def need(asked: str) -> Choice:
    """As ``choose``, where ``exact`` in place of the engine would be no answer.

    Raises:
        UsageError: there is no such engine, or it does not work here.
    """
    chosen = choose(asked)
    if chosen.name == "exact" != asked:
        raise _lacking(asked, chosen.why)
    return chosen


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
    found = KINDS[asked].trial()
    if found.kind is not None:
        return Choice(asked, aside=found.why, kind=found.kind)
    if asked == "fast":
        return Choice("exact", found.why)
    raise _lacking(asked, found.why)


def kind_of(engine: str) -> Kind:
    """How an engine packs on this machine.

    Raises:
        UsageError: it does not work here.
    """
    found = KINDS[engine].trial()
    if found.kind is None:
        raise _lacking(engine, found.why)
    return found.kind


def _lacking(asked: str, why: str) -> UsageError:
    return UsageError(
        f"This machine cannot run the engine {asked!r} ({why})",
        where="--compute",
        expected="a processor and a torch that have its products",
        remedy="splitlm doctor shows which engines work here",
    )
