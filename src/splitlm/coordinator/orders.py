"""What a training run is told, what is known of it, and who averages for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from splitlm.coordinator.members import Who
from splitlm.core import training
from splitlm.core.errors import CheckpointError
from splitlm.core.shape import Shape
from splitlm.telemetry.summary import perplexity


class Aggregator(Protocol):
    """Who averages; it holds the tensors that this room does not."""

    @property
    def busy(self) -> bool:
        """Whether it is averaging now: parties wait for it then."""
        ...

    @property
    def jobs(self) -> int:
        """How many times it was busy and is no more."""
        ...

    async def expect(self, members: list[Who]) -> None:
        """These take part in the run."""
        ...

    async def begin(self, round_: int, members: list[Who]) -> None:
        """A round's states are about to come from these."""
        ...

    async def without(self, who: Who) -> None:
        """This one is lost: wait for it no longer."""
        ...

    async def complete(self, round_: int, saved: dict[Who, training.Saved]) -> set[Who]:
        """Everyone has the round's average: write what is to be kept; whose states are in the average."""
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
        aggregator: where states go; nothing where a worker averages.
        averages: the node of that worker (``Members.at``); empty where the coordinator's process averages.
        first: the round to begin with.
        resume: the last complete round, or −1.
        stored: of that round: each party's files, by ``stored_name``.
        drifts: whether workers' replicas differ until a round's end, and what one of them learned goes with it.
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
    averages: str = ""
    first: int = 0
    resume: int = -1
    stored: Mapping[str, list[training.SavedFile]] = field(default_factory=dict)
    drifts: bool = False
    deadline_s: float = 60.0
    timeout_s: float = 120.0
    validate: bool = False

    def stored_for(self, who: Who) -> tuple[str, list[training.SavedFile]]:
        """Whose files a party goes on from: its own, or those of another of its role, and these files.

        Raises:
            CheckpointError: there is none of its role.
        """
        if self.resume < 0:
            return "", []
        alike = sorted(name for name in self.stored if name.rpartition("-")[0] == who[0])
        name = stored_name(who)
        if name not in self.stored:
            if not alike:
                raise CheckpointError(f"Round {self.resume} has no {who[0]}", expected="one at least")
            name = alike[0]
        return name, self.stored[name]


def stored_name(who: Who) -> str:
    """What a party is called in a checkpoint."""
    return f"{who[0]}-{who[1]}"


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
    alone: dict[Who, int] = field(default_factory=dict)

    def next_alone(self, who: Who) -> int:
        """The number of the next window of an owner that steps alone, where nothing is agreed."""
        number = self.alone[who] = self.alone.get(who, -1) + 1
        return number

    def row(self, token_loss: bool) -> dict[str, Any]:
        """The round as it is recorded.

        Args:
            token_loss: whether the loss is a mean over tokens, of which there is a perplexity.
        """
        told = self.notified.values()
        items, valid, counted = (sum(getattr(n, of) for n in told) for of in ("items", "valid_items", "counted"))
        row: dict[str, Any] = {
            "round": self.round,
            "windows": self.windows,
            "repeated": self.repeated,
            "samples": sum(n.samples for n in told),
            "loss": sum(n.loss for n in told) / items if items else None,
        }
        if valid:
            row["valid_loss"] = loss = sum(n.valid_loss for n in told) / valid
            if token_loss:
                row["valid_perplexity"] = perplexity(loss)
        if counted:
            row["accuracy"] = sum(n.correct for n in told) / counted
        return row
