"""What a training run is told, what is known of it, and who averages for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from splitlm.coordinator.members import Who
from splitlm.core import training
from splitlm.core.shape import Shape


class Aggregator(Protocol):
    """Who averages; it holds the tensors that this room does not."""

    async def begin(self, round_: int, members: list[Who]) -> None:
        """A round's states are about to come from these."""
        ...

    async def without(self, who: Who) -> None:
        """This one is lost: wait for it no longer."""
        ...

    async def complete(self, round_: int, saved: dict[Who, training.Saved]) -> None:
        """Everyone has the round's average: write what is to be kept."""
        ...


@dataclass(frozen=True)
class Orders:
    """What is to be run.

    Attributes:
        shape: a row of the table.
        owners: how many.
        workers: how many.
        rounds: how many, from ``first`` on.
        settings: of the run, for every party.
        run: its number, to be claimed on links.
        classes: of a classifier's head.
        aggregator: where states go.
        first: the round to begin with.
        resume: the last complete round, or −1.
        deadline_s: how long to wait for parties.
        timeout_s: how long a window may stand still.
        validate: whether owners validate before each round's average.
    """

    shape: Shape
    owners: int
    workers: int
    rounds: int
    settings: dict[str, object]
    run: str
    classes: int = 0
    aggregator: tuple[str, int] = ("", 0)
    first: int = 0
    resume: int = -1
    deadline_s: float = 60.0
    timeout_s: float = 120.0
    validate: bool = False


@dataclass
class Standing:
    """What is known of the round at hand, for the log and the closing summary."""

    round: int = 0
    window: int = 0
    windows: int = 0
    repeated: int = 0
    loss: float = 0.0
    items: int = 0
    notified: dict[Who, training.Notify] = field(default_factory=dict)
