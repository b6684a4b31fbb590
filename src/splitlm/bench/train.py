"""The figures of training. Each function measures one comparison and gives its figures."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from splitlm.bench.arm import Arm
from splitlm.bench.figure import Figure, Goal, figure, ratios
from splitlm.bench.trainlinks import link, rounds, wire_bytes
from splitlm.bench.trainplan import TOY, TrainPlan, balanced, rate, two_cores
from splitlm.bench.trainset import Size, settings

LEAST_PACE_MS = 20.0
"""Of the faster of two simulated workers, forward or backward: so that an owner's milliseconds do not decide."""
SHARES_WITHIN = 10.0
MICROBATCHES = 4
"""Of a window of two stages."""


def uncut(plan: TrainPlan) -> list[Figure]:
    """An owner and a worker on a core each against the uncut loop on both."""
    size, cores = plan.size, two_cores(plan)
    folder = plan.built(size)

    def config(cut: tuple[int, int]) -> dict[str, Any]:
        return settings(folder, size, "u-shape", cut)

    cut, apart = balanced(plan, config, tail=True)
    with plan.arms() as arms:
        run = arms.start("train", config=config(cut), cores=cores)
        ours = arms.start("train-uncut", config=config(cut), threads=2)
        plain = arms.start("train-plain", config=config(cut), threads=2, spin=True)
        alone = arms.start("train-plain", config=config(cut), threads=1, core=cores[0] if cores else None)
        averages: list[float] = []

        def split() -> float:
            took = run.run()
            averages.append(1e3 * float(took["average"]))
            return float(took["rows"]) / float(took["seconds"])

        sides = {"split": split, "ours": rate(ours), "plain": rate(plain), "one thread": rate(alone)}
        samples = arms.turns(sides)
    best = max(("ours", "plain"), key=lambda side: median(samples[side]))
    names = {"ours": "model/uncut_train", "plain": "a plain loop over transformers"}
    note = ", ".join(f"{names[side]} {median(samples[side]):.1f} rows/s" for side in names)
    return [
        figure(
            "uncut",
            "u-shape, 1 owner + 1 worker on one core each ÷ uncut loop on two threads, rows/s",
            ratios(samples, "split", best),
            goal=Goal(">=", 0.85, 0.95),
            note=f"uncut: {names[best]}, the faster ({note}); split {median(samples['split']):.1f} rows/s; "
            f"cut-layers {cut[0]}, tail-blocks {cut[1]}",
        ),
        figure(
            "uncut-shares",
            "forward and backward of the owner's parts against the worker's, alone on a core: difference",
            [apart],
            unit="%",
            goal=Goal("<=", SHARES_WITHIN),
        ),
        figure(
            "uncut-threads", "a plain loop over transformers, two threads ÷ one", ratios(samples, "plain", "one thread")
        ),
        figure(
            "uncut-average",
            "a round's end: both parties' states to the aggregator and back",
            averages[1:],
            unit="ms",
            note="not in the rates above, which are those of windows",
        ),
    ]


def unequal(plan: TrainPlan) -> list[Figure]:
    """Two simulated workers, one three times as fast, against the sum of what each does alone."""
    size = TOY
    folder = plan.built(size)
    more = {"max_inflight": size.microbatches, "worker_max_inflight": size.microbatches, "adaptive_weights": True}
    fast, slow = LEAST_PACE_MS, 3 * LEAST_PACE_MS
    with plan.arms() as arms:

        def run(*paces: float) -> Arm:
            config = settings(folder, size, "u-shape", (1, 1), len(paces), **more)
            return arms.start("train", config=config, paces=list(paces))

        both, first, second = run(fast, slow), run(fast), run(slow)
        whole: list[float] = []

        def steady(arm: Arm) -> float:
            took = arm.run()
            if arm is both:
                whole.append(float(took["rows"]) / float(took["seconds"]))
            rows, seconds = took["steady"]
            return float(rows) / float(seconds)

        samples = arms.turns({"both": lambda: steady(both), "sum": lambda: steady(first) + steady(second)})
    return [
        figure(
            "unequal",
            "two simulated workers 3:1 ÷ the sum of their solo rates, rows/s, adaptive weights",
            ratios(samples, "both", "sum"),
            goal=Goal(">=", 0.90, 0.97),
            note=f"{fast:g} and {slow:g} ms for a forward and for a backward; the first window of a round, "
            "in which both count alike, is left out",
        ),
        figure(
            "unequal-rounds",
            f"the same with the first of a round's {size.windows} windows ÷ the solo rates of the others",
            [a / b for a, b in zip(whole[1:], samples["sum"], strict=True)],
        ),
    ]


def stages(plan: TrainPlan) -> list[Figure]:
    """Two stages against torch.distributed.pipelining with the same model, cut and microbatches."""
    cores = two_cores(plan)
    windows = max(1, plan.size.windows * plan.size.microbatches // MICROBATCHES)
    size = replace(plan.size, microbatches=MICROBATCHES, windows=windows)
    folder = plan.built(size)

    def config(cut: tuple[int, int]) -> dict[str, Any]:
        return settings(folder, size, "two-stage", cut)

    cut, apart = balanced(plan, config, tail=False)
    with plan.arms() as arms:
        run = arms.start("train", config=config(cut), cores=cores)
        pipe = arms.start("train-pipe", config=config(cut), cores=cores)
        samples = arms.turns({"stages": rate(run), "pipelining": rate(pipe)})
    return [
        figure(
            "stages",
            f"two-stage, control-count {MICROBATCHES} ÷ torch.distributed.pipelining (gloo, 1F1B, "
            f"{MICROBATCHES} microbatches), rows/s",
            ratios(samples, "stages", "pipelining"),
            goal=Goal(">=", 1.0),
            note=f"{median(samples['stages']):.1f} and {median(samples['pipelining']):.1f} rows/s; "
            f"cut-layers {cut[0]}, shares differ by {apart:.1f} %; "
            "our last stage steps after every microbatch, theirs once a window",
        )
    ]


COMPARISONS: Mapping[str, Callable[[TrainPlan], list[Figure]]] = {
    "uncut": uncut,
    "unequal": unequal,
    "stages": stages,
    "bytes": wire_bytes,
    "link": link,
    "rounds": rounds,
}


def measure(
    names: Sequence[str],
    *,
    size: Size,
    repetitions: int,
    rounds: int,
    say: Callable[[str], None] = lambda _: None,
) -> list[Figure]:
    """The figures of these comparisons.

    Args:
        names: keys of ``COMPARISONS``.
        size: of what is trained where compute matters.
        repetitions: turns that count.
        rounds: of the run whose memory is watched.
        say: takes one line of progress.

    Raises:
        SplitlmError: a run could not begin, or broke.
    """
    with tempfile.TemporaryDirectory(prefix="splitlm-bench-") as scratch:
        plan = TrainPlan(
            model="",
            work=Path(scratch),
            scratch=Path(scratch),
            hidden=size.hidden,
            repetitions=repetitions,
            say=say,
            size=size,
            rounds=rounds,
        )
        found: list[Figure] = []
        for name in names:
            say(f"{name}: {str(COMPARISONS[name].__doc__).splitlines()[0]}")
            found += COMPARISONS[name](plan)
    return found
