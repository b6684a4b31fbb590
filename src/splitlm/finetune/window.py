"""A window as one party sees it: what is summed in it, how the loss is scaled, and what leaves because of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from splitlm.core.shape import Role
from splitlm.model.stepping import GradientSum
from splitlm.wire.frame import Header

Lane = Literal["activation", "gradient"]


@dataclass(frozen=True, eq=False)
class Out:
    """Something to be sent.

    Attributes:
        lane: which of the links to ``to``.
        to: an owner's or a worker's number, as ``role`` says; −1 for the worker that the owner chose.
        header: without the tensors' specs.
        tensors: its payload.
    """

    lane: Lane
    role: Role
    to: int
    header: Header
    tensors: tuple[torch.Tensor, ...] = ()


@dataclass
class Tally:
    """What a window was like here: sums and counts.

    Attributes:
        loss: sum over ``items``, where the loss is computed.
        weight: items of the losses of the microbatches that came through.
        samples: rows that came through.
        padded: tokens that came through and back, padding included.
        seconds: that their forwards and backwards took.
        correct: of the metric, over ``counted``.
    """

    loss: float = 0.0
    items: int = 0
    weight: int = 0
    samples: int = 0
    padded: int = 0
    seconds: float = 0.0
    correct: float = 0.0
    counted: int = 0

    def add(self, loss: float, items: int, correct: float = 0.0, counted: int = 0) -> None:
        """One microbatch's loss and metric."""
        self.loss, self.items = self.loss + loss, self.items + items
        self.correct, self.counted = self.correct + correct, self.counted + counted


@dataclass
class WindowScale:
    """By what the loss of a microbatch is divided: once, where it is computed.

    Attributes:
        total: microbatches of the group in this window, or items of all their losses where ``by_item``.
        own: those of this party.
    """

    total: int = 1
    own: int = 1
    by_item: bool = False

    def of(self, weight: int) -> float:
        """The factor of one microbatch's summed loss."""
        return 1.0 / self.total if self.by_item else 1.0 / (max(weight, 1) * self.total)


@dataclass
class OpenWindow:
    """What a party keeps of a window until it is stepped or dropped.

    Attributes:
        seq: of the attempt.
        scale: of the loss.
        sum: of the gradients.
        tally: of what was computed.
        train: False in validation: forward only.
    """

    seq: int
    scale: WindowScale
    sum: GradientSum
    tally: Tally = field(default_factory=Tally)
    train: bool = True
