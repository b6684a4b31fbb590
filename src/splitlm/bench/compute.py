"""The figures of an engine other than exact: what it brings uncut, cut and in batches, and what it takes to start."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial

from splitlm.bench import llamacpp
from splitlm.bench.arm import Arm
from splitlm.bench.comparison import STAGES, Comparison, Comparisons, Plan
from splitlm.bench.figure import Figure, Goal, figure, left_out, ratios
from splitlm.bench.streamed import hop, streamed
from splitlm.bench.turns import interleave

UNCUT = {"fast": Goal(">=", 3.0, 3.6), "int8 (native)": Goal(">=", 4.0)}
"""By the engine that was asked for or that runs, against bfloat16; the others are told without a goal."""
BATCHES = (4, 8)


def uncut(plan: Plan) -> list[Figure]:
    """Our uncut loop against transformers' ``generate`` and llama.cpp, on one core."""
    core = max(os.sched_getaffinity(0))
    why = llamacpp.missing(plan.gguf)
    with plan.arms() as arms:
        sides = {"ours": arms.uncut(compute=plan.compute, core=core)}
        for dtype in ("bfloat16", "float32"):
            sides[dtype] = arms.start("generate", model=plan.model, dtype=dtype, core=core)
        for kind in () if why else llamacpp.FORMATS:
            sides[kind] = arms.start("llama", gguf=plan.gguf, form=kind, tokens=plan.tokens, core=core)
        samples = arms.turns({name: partial(arm.rate, tokens=plan.tokens) for name, arm in sides.items()})
        engine = sides["ours"].told["engine"]
    ours = f"our uncut loop, {plan.compute}"
    return [
        figure(
            "uncut-bf16",
            f"{ours} ÷ transformers generate in bfloat16, tokens/s, one core, one thread",
            ratios(samples, "ours", "bfloat16"),
            goal=UNCUT.get(plan.compute) or UNCUT.get(engine),
            note="" if engine == plan.compute else f"{engine} runs",
        ),
        figure("uncut-fp32", "the same ÷ transformers generate in float32", ratios(samples, "ours", "float32")),
        figure("rate", ours, samples["ours"], unit="tokens/s"),
        *_beside(samples, why),
    ]


def _beside(samples: Mapping[str, Sequence[float]], why: str) -> list[Figure]:
    """llama.cpp's own figures, or why there are none."""
    if why:
        return [left_out("llama", f"llama.cpp, {' and '.join(llamacpp.FORMATS)}", why, unit="tokens/s")]
    return [
        figure(f"llama-{name.lower()}", f"llama.cpp, {name}", samples[name], unit="tokens/s")
        for name in llamacpp.FORMATS
    ]


def stream(plan: Plan) -> list[Figure]:
    """One stream through a ring of three against the uncut model, and what memory its stages took."""
    with plan.arms() as arms:
        ring = arms.ring(stages=STAGES, compute=plan.compute, trace=str(plan.work / "stream"))
        alone = arms.uncut(compute=plan.compute)
        bare = arms.start("bare-ring", model=plan.model, dtype=plan.dtype, cuts=ring.told["cuts"], compute=plan.compute)
        sides = {"ring": ring, "uncut": alone, "bare": bare}
        samples = arms.turns({name: partial(arm.rate, tokens=plan.tokens) for name, arm in sides.items()})
        seen = ring.run("finish")
    return [
        *streamed(samples, ring.told["cuts"], seen, f"both {plan.compute}", Goal(">=", 0.85, 0.95)),
        hop(seen),
        figure(
            "memory",
            "peak memory beyond the imports ÷ its bound (weights and KV once, one tensor, a chunk, 64 MiB), per stage",
            list(seen["memory"].values()),
            goal=Goal("<=", 1),
        ),
    ]


def batch(plan: Plan) -> list[Figure]:
    """Sessions that step together in our uncut engine, against transformers' ``generate`` of a batch, on one core."""
    core = max(os.sched_getaffinity(0))
    with plan.arms() as arms:
        ours = arms.start("batch", model=plan.model, dtype=plan.dtype, compute=plan.compute, core=core)
        theirs = arms.start("generate", model=plan.model, dtype="bfloat16", core=core)
        samples = arms.turns(
            {
                f"{name} {size}": partial(arm.rate, tokens=plan.tokens, sessions=size)
                for size in BATCHES
                for name, arm in (("ours", ours), ("generate", theirs))
            }
        )
        width = ours.told["width"]
    note = "" if width > 1 else f"{plan.compute} takes one session at a time: others would change its numbers"
    return [
        figure(
            f"batch-{size}",
            f"{size} sessions, our uncut engine, {plan.compute} ÷ transformers generate in bfloat16, batch {size}",
            ratios(samples, f"ours {size}", f"generate {size}"),
            goal=Goal(">=", 2.0),
            note=note,
        )
        for size in BATCHES
    ]


def start(plan: Plan) -> list[Figure]:
    """What packing takes: per block, and of a process's start, against exact."""
    loads: dict[str, list[float]] = {"exact": [], plan.compute: []}
    packs: list[float] = []

    def began(compute: str) -> float:
        begin = time.perf_counter()
        with Arm("load", model=plan.model, dtype=plan.dtype, compute=compute) as arm:
            arm.ready()
            took = time.perf_counter() - begin
            loads[compute].append(arm.told["ms"])
            if compute == plan.compute:
                packs.append(arm.run()["ms"])
        return took

    names = {name: partial(began, name) for name in loads}
    samples = interleave(names, plan.repetitions, plan.say)
    counted = {name: values[-plan.repetitions :] for name, values in loads.items()}
    return [
        figure("pack", f"packing one block, {plan.compute}", packs[-plan.repetitions :], unit="ms"),
        figure(
            "start",
            f"from a process's start until the whole model could compute, {plan.compute} ÷ exact",
            ratios(samples, plan.compute, "exact"),
            goal=Goal("<=", 1.5),
        ),
        figure(
            "start-load",
            "loading alone, packing included, imports left out: the same ratio",
            ratios(counted, plan.compute, "exact"),
        ),
    ]


COMPARISONS: Comparisons = {
    "uncut": Comparison(uncut),
    "stream": Comparison(stream),
    "batch": Comparison(batch),
    "start": Comparison(start),
}
