"""What the comparisons of training share: the plan, cores, turns, and a cut that is even."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitlm.bench.arm import Arm
from splitlm.bench.comparison import Plan
from splitlm.bench.trainset import Size, build

TOY = Size(hidden=32, blocks=4, batch=4, length=8, microbatches=16, windows=4)
"""Where compute is simulated, or of no matter."""


@dataclass(frozen=True)
class TrainPlan(Plan):
    """What every comparison of training is measured with.

    Attributes:
        size: of what is trained where compute matters.
        rounds: of the run whose memory is watched.
    """

    size: Size = field(default_factory=Size)
    rounds: int = 200

    def built(self, size: Size) -> Path:
        """The folder of a model and rows of this size."""
        folder = self.scratch / "-".join(map(str, (size.hidden, size.blocks, size.rows, size.length)))
        return folder if folder.exists() else build(folder, size)


def two_cores(plan: TrainPlan) -> list[int] | None:
    """A core for each of two processes; None where there is one."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) == 2:
        return cores
    plan.say("this machine has one core: nothing is pinned")
    return None


def rate(arm: Arm) -> Callable[[], float]:
    """One turn of training: rows per second."""

    def take() -> float:
        took = arm.run()
        return float(took["rows"]) / float(took["seconds"])

    return take


def balanced(plan: TrainPlan, config: Callable[[tuple[int, int]], dict[str, Any]], tail: bool) -> tuple[Any, float]:
    """The cut whose two parties have the most equal shares of a microbatch, and by how many per cent they differ.

    Args:
        plan: the bench's.
        config: of a run, by its cut.
        tail: whether the owner has the last blocks, too.
    """
    cores, blocks = two_cores(plan), plan.size.blocks
    found: dict[tuple[int, int], float] = {}
    with plan.arms() as arms:
        shares = arms.start("train-shares", config=config((1, 0)), core=cores[0] if cores else None)
        for own in range(max(1, blocks // 2 - 1), min(blocks, blocks // 2 + 2)):
            cut = (own - own // 2, own // 2) if tail else (own, 0)
            took = shares.run(cut_layers=cut[0], tail_blocks=cut[1], repetitions=2 * plan.repetitions)
            found[cut] = 100 * abs(took["owner"] - took["worker"]) / max(took["owner"], took["worker"])
    cut = min(found, key=found.__getitem__)
    return cut, found[cut]
