"""How good a model is on one microbatch, without training on it: sums and counts, which is all that its owner tells."""

from __future__ import annotations

from typing import NamedTuple

import torch

from splitlm.core.errors import ModelError
from splitlm.finetune.objective import Objective
from splitlm.finetune.window import Out
from splitlm.model.tuned import TunedPart
from splitlm.wire.frame import Forward, Scored


class Score(NamedTuple):
    """Sums over some rows.

    Attributes:
        loss: over ``items``.
        items: of the loss.
        correct: of the metric, over ``counted``.
        counted: items of the metric; 0 where the objective has none.
    """

    loss: float = 0.0
    items: int = 0
    correct: float = 0.0
    counted: int = 0

    def plus(self, other: Score) -> Score:
        """The sums over the rows of both."""
        return Score(
            self.loss + other.loss,
            self.items + other.items,
            self.correct + other.correct,
            self.counted + other.counted,
        )


def look(
    part: TunedPart, goal: Objective, inputs: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor, where: str
) -> Score:
    """Run the part with the head over one microbatch, without a graph and without dropout.

    Args:
        part: it may be the whole model.
        goal: what is minimised.
        inputs: as ``TunedPart.forward`` takes them.
        mask: ``[B, T]``.
        labels: ``[B]`` or ``[B, T]``.
        where: the place, for the error.

    Raises:
        ModelError: the loss is not finite.
        ProtocolError: inputs of a wrong shape or type.
    """
    output = part.outputs(inputs, mask, goal)
    total, items = goal.value(output, labels)
    if not bool(torch.isfinite(total)):
        raise ModelError(f"The loss of a microbatch is {float(total)}", where=where, expected="a finite number")
    return Score(float(total), items, *goal.metric(output, labels))


def scored(header: Forward, score: Score) -> Out:
    """What the owner of a microbatch is told, where the head is not its own."""
    said = Scored(
        round=header.round,
        window=header.window,
        owner=header.owner,
        index=header.index,
        loss=score.loss,
        items=score.items,
        correct=score.correct,
        counted=score.counted,
    )
    return Out("gradient", "owner", header.owner, said)
