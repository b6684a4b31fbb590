"""An owner's validation of one round: its rows, whose turn each microbatch is, and what may be told of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from splitlm.finetune.batch import Microbatch
from splitlm.finetune.discretion import LEAST
from splitlm.finetune.scoring import Score
from splitlm.finetune.window import Tally
from splitlm.planner.routing import SmoothWRR


class Validation:
    """Rows that are held against the model before the round's average; they change nothing in it.

    Args:
        batches: the rows, in microbatches; none where there is nothing to validate.
    """

    def __init__(self, batches: Sequence[Microbatch] = ()) -> None:
        self._batches = batches
        self._turns: SmoothWRR[int] | None = None
        self._samples = 0
        self._score = Score()
        self.at = 0
        """Microbatches that are done."""

    def next(self, most: int) -> Sequence[Microbatch]:
        """The next microbatches, as many as a window takes; they stay to be done until ``take``."""
        return self._batches[self.at : self.at + most]

    def left(self) -> int:
        """How many are to be done."""
        return len(self._batches) - self.at

    def turns(self, weights: Mapping[int, float]) -> SmoothWRR[int]:
        """Turns of the workers, by these weights at first: training's own turns stay as they are."""
        if self._turns is None:
            self._turns = SmoothWRR(weights)
        return self._turns

    def take(self, batches: Sequence[Microbatch], tally: Tally) -> None:
        """These are done."""
        self.at += len(batches)
        self._samples += sum(batch.samples for batch in batches)
        self._score = self._score.plus(Score(tally.loss, tally.items, tally.correct, tally.counted))

    def told(self) -> Score:
        """Sums and counts that may leave: nothing where they are of so few samples that they would tell of one."""
        return self._score if self._samples >= LEAST else Score()
