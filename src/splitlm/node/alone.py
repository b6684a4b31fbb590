"""An owner's round where nothing is agreed: it runs its windows one after the other, and steps when each is done."""

from __future__ import annotations

from collections.abc import Sequence

from splitlm.bus.base import Spoke
from splitlm.core import training
from splitlm.finetune.batch import Microbatch
from splitlm.finetune.compute import Runs
from splitlm.finetune.discretion import Report
from splitlm.finetune.engine import Engine, WindowPlan
from splitlm.finetune.party import Party
from splitlm.finetune.window import WindowScale
from splitlm.node.validation import Validation


class Alone:
    """One owner of a shape without barriers.

    Args:
        party: the owner.
        engine: what runs its windows.
        runner: its compute thread.
        spoke: the way to the coordinator.
        count: microbatches of a window (``control-count``).
    """

    def __init__(
        self,
        party: Party,
        engine: Engine,
        runner: Runs,
        spoke: Spoke,
        count: int,
    ) -> None:
        self._party, self._engine, self._runner, self._spoke = party, engine, runner, spoke
        self._count = count
        self._steps = 0

    async def round(self, round_: int, rows: Sequence[Microbatch], validation: Validation, report: Report) -> int:
        """Train on these, then validate; how many samples were trained on.

        Raises:
            LinkLostError: the worker says nothing any more. Otherwise as ``Engine.window``.
        """
        samples = 0
        for number, begin in enumerate(range(0, len(rows), self._count)):
            batches = rows[begin : begin + self._count]
            await self._engine.window(self._plan(round_, number, batches))
            tally = self._party.window.tally
            norm = await self._runner.run(self._party.step, 1.0 / len(batches))
            here = sum(batch.samples for batch in batches)
            samples += here
            told = report.add(tally.loss, tally.items, here)
            self._steps += 1  # no attempts are numbered here, and rounds count their windows anew
            await self._spoke.send(training.Stepped(self._steps, *told, 0.0, norm))
        if looked := validation.next(validation.left()):  # one window, numbered after those of training
            await self._engine.window(self._plan(round_, -(-len(rows) // self._count), looked, False))
            validation.take(looked, self._party.window.tally)
            await self._engine.drop()
        return samples

    def _plan(self, round_: int, number: int, batches: Sequence[Microbatch], train: bool = True) -> WindowPlan:
        return WindowPlan(
            seq=number,
            round=round_,
            number=number,
            order=[(self._party.number, i) for i in range(len(batches))],
            scale=WindowScale(1, 1),
            batches=batches,
            assign=[0] * len(batches),
            credit=self._count,
            inflight=self._count,
            train=train,
        )
