"""The figures of what a training run sends, and of what it keeps."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from splitlm.bench.figure import Figure, Goal, figure, ratios
from splitlm.bench.trainplan import TOY, TrainPlan
from splitlm.bench.trainset import settings
from splitlm.bench.trend import trend

MIB = 1024 * 1024


def wire_bytes(plan: TrainPlan) -> list[Figure]:
    """What travels on the lanes of a run, against the tensors in it."""
    size = replace(plan.size, blocks=3, microbatches=2, windows=2)
    folder = plan.built(size)
    with plan.arms() as arms:
        run = arms.start("train", config=settings(folder, size, "u-shape", (1, 1)))
        for _ in range(plan.repetitions):
            run.run()
        parties = run.run("finish")["parties"]
    shares = [
        party["figures"][f"{lane}_bytes_out"] / (party["figures"][f"{lane}_frames_out"] * size.tensor_bytes)
        for party in parties
        for lane in ("activation", "gradient")
    ]
    return [
        figure(
            "bytes",
            f"bytes on the lanes ÷ bytes of hidden states and their gradients, {size.tensor_bytes // 1024} KiB each",
            shares,
            goal=Goal("<=", 1.01),
            note="a value per lane and party over all rounds; masks, headers and padding are what is above 1",
        )
    ]


def link(plan: TrainPlan) -> list[Figure]:
    """The lanes between owner and worker, beside a bare socket."""
    large, small, count = 64 * MIB, 32 * 1024, 40 * plan.repetitions
    with plan.arms() as arms:
        lanes, echo = arms.start("train-lanes"), arms.start("echo")
        samples = arms.turns(
            {
                "lane large": lambda: float(lanes.run(size=large, count=3, whole=False)["ms"]),
                "echo large": lambda: float(echo.run(size=large, count=3, stream=True)["ms"]),
                "lane small": lambda: float(lanes.run(size=small, count=count)["ms"]),
                "echo small": lambda: 2 * float(echo.run(size=small, count=count)["ms"]),
            }
        )
    note = "copied out of the frame on the compute thread; bare socket {:.3g} ms"
    return [
        figure(
            "link-64mib",
            "a tensor of 64 MiB one way, from the sender's hands to the receiver's compute thread (and a word back)",
            samples["lane large"],
            unit="ms",
            goal=Goal("<=", 150.0, 100.0),
            note=note.format(median(samples["echo large"])),
        ),
        figure("link-64mib-echo", "the same ÷ a bare socket's", ratios(samples, "lane large", "echo large")),
        figure(
            "link-32kib",
            "a tensor of 32 KiB there and one back, p50",
            samples["lane small"],
            unit="ms",
            goal=Goal("<=", 0.5),
            note=note.format(median(samples["echo small"])),
        ),
        figure("link-32kib-echo", "the same ÷ a bare socket's", ratios(samples, "lane small", "echo small")),
    ]


def rounds(plan: TrainPlan) -> list[Figure]:
    """Memory over many short rounds, and graphs that are kept."""
    size = replace(TOY, microbatches=4, windows=2)
    credit = 2
    folder = plan.built(size)
    config = settings(folder, size, "u-shape", (1, 1), max_inflight=credit)
    with plan.arms() as arms:
        run = arms.start("train", config=config)
        for _ in range(plan.rounds - 1):
            run.run()
        told = run.run("finish")
    owner, worker = told["parties"]
    series = {"owner": owner["rss"], "worker": worker["rss"], "coordinator": told["rss"]}
    found = []
    for name, values in series.items():
        slope, error = trend(values[len(values) // 5 :])
        found.append(
            Figure(
                name=f"rounds-{name}",
                text=f"{name}: growth of memory per round over {len(values)} rounds, least squares ± 2 standard errors",
                value=slope,
                low=slope - 2 * error,
                high=slope + 2 * error,
                count=len(values) - len(values) // 5,
                unit="KiB",
                goal=Goal("<=", 4.0),
                note=f"the first fifth is left out; {values[-1] / 1024:.0f} MiB at the end",
            )
        )
    peaks = [float(party["figures"]["peak_live"]) for party in (owner, worker)]
    text = f"live graphs at their most, owner and worker ÷ the credit of {credit}"
    return [*found, figure("rounds-graphs", text, [peak / credit for peak in peaks], goal=Goal("<=", 1.0))]
