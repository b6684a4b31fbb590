"""What the comparisons of one run share: the model, the number of turns, and arms that end together."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitlm.bench.arm import Arm
from splitlm.bench.figure import Figure
from splitlm.bench.turns import interleave
from splitlm.core.errors import UsageError

STAGES = 3
PROMPT_TOKENS = 8
"""Of a text, unless its comparison says otherwise."""


@dataclass(frozen=True)
class Plan:
    """What every comparison is measured with.

    Attributes:
        model: the model's folder.
        work: folder for traces.
        scratch: folder for what is not kept.
        hidden: width of the model's hidden states, in values.
        tokens: new tokens per session and turn.
        repetitions: turns that count.
        compute: the engine of what is ours.
        gguf: the model as a GGUF file, "" where it did not come as one.
        say: takes one line of progress.
    """

    model: str
    work: Path
    scratch: Path
    hidden: int
    tokens: int = 64
    repetitions: int = 5
    dtype: str = "float32"
    compute: str = "exact"
    gguf: str = ""
    say: Callable[[str], None] = lambda _: None

    def arms(self) -> Arms:
        """A group of arms that end together."""
        return Arms(self)

    def toy(self, blocks: int) -> str:
        """Folder of a tiny model with so many blocks, for simulated devices."""
        from splitlm.model import toy

        folder = self.scratch / f"toy-{blocks}"
        return str(folder if folder.exists() else toy.build(folder, blocks))

    @property
    def frame_bytes(self) -> int:
        """Size of a decode step's frame: one row in fp32, and some 100 bytes around it."""
        return 4 * self.hidden + 100


class Arms(ExitStack):
    """Arms of one comparison: they start side by side, take turns once all are ready, and end together."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan
        self._started: list[Arm] = []

    def start(self, kind: str, **settings: Any) -> Arm:
        """An arm that is starting; whoever asks it something waits until it is ready."""
        self._started.append(self.enter_context(Arm(kind, **settings)))
        return self._started[-1]

    def ring(self, **settings: Any) -> Arm:
        """A ring of the plan's model."""
        plan = self._plan
        return self.start("ring", **{"model": plan.model, "dtype": plan.dtype, **settings})

    def uncut(self, **settings: Any) -> Arm:
        """The plan's model, uncut."""
        return self.start("uncut", model=self._plan.model, dtype=self._plan.dtype, **settings)

    def turns(self, sides: Mapping[str, Callable[[], float]], each: int = 1) -> dict[str, list[float]]:
        """``interleave`` for the plan's repetitions, times ``each``, while no arm is starting: that takes the cores.

        Raises:
            SplitlmError: an arm could not start.
        """
        for arm in self._started:
            arm.ready()
        return interleave(sides, each * self._plan.repetitions, self._plan.say)


@dataclass(frozen=True)
class Comparison:
    """What is measured, and how long its texts are.

    Attributes:
        measure: gives the figures; the first line of its docstring says of what.
        length: positions of the longest text, prompt included, for so many new tokens.
        toy: whether a tiny model of ours computes, and not the plan's.
    """

    measure: Callable[[Plan], list[Figure]]
    length: Callable[[int], int] = lambda tokens: PROMPT_TOKENS + tokens
    toy: bool = False


Comparisons = Mapping[str, Comparison]


def measure(
    comparisons: Comparisons,
    model: str,
    names: Sequence[str],
    *,
    tokens: int,
    repetitions: int,
    compute: str = "exact",
    folder: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[Figure]:
    """The figures of these comparisons.

    Args:
        comparisons: to choose from.
        model: hub id, directory or ``smollm2-135m``.
        names: keys of ``comparisons``.
        tokens: new tokens per session and turn.
        repetitions: turns that count.
        compute: the engine of what is ours.
        folder: where traces go; None keeps none.
        say: takes one line of progress.

    Raises:
        ModelMissingError: there is no such model.
        UsageError: a text of one of them is longer than the model's context, or this machine lacks the engine.
        SplitlmError: a ring could not be formed, or broke.
    """
    from splitlm.model.compute.choice import need
    from splitlm.model.load import ModelFiles
    from splitlm.model.source import gguf_of, resolve

    need(compute)
    found = resolve(model, progress=say)
    files = ModelFiles(found)
    for name in names:
        _check_length(name, comparisons[name], tokens, files.context)
    with tempfile.TemporaryDirectory(prefix="splitlm-bench-") as scratch:
        plan = Plan(
            model=str(found),
            work=folder.absolute() if folder is not None else Path(scratch),
            scratch=Path(scratch),
            hidden=files.hidden,
            tokens=tokens,
            repetitions=repetitions,
            compute=compute,
            gguf=str(gguf_of(model) or ""),
            say=say,
        )
        figures: list[Figure] = []
        for name in names:
            say(f"{name}: {str(comparisons[name].measure.__doc__).splitlines()[0]}")
            figures += comparisons[name].measure(plan)
    return figures


def _check_length(name: str, chosen: Comparison, tokens: int, context: int) -> None:
    """See that every text fits: one that the context ends early would be taken for a fast one."""
    from splitlm.model import toy

    needed, room = chosen.length(tokens), toy.CONTEXT if chosen.toy else context
    if needed > room:
        fewer = tokens - (needed - room)
        helps = fewer > 1 and chosen.length(fewer) <= room
        raise UsageError(
            f"The comparison {name} is of texts of {needed} tokens",
            expected=f"at most {room}, the context of the {'toy' if chosen.toy else 'model'}",
            remedy=f"Use at most --tokens {fewer}" if helps else "Leave it out with --only, or take another model",
        )
