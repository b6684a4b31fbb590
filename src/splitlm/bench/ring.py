"""The figures of a ring without migration. Each function measures one comparison and gives its figures."""

from __future__ import annotations

import os

from splitlm.bench.comparison import STAGES, Comparison, Comparisons, Plan
from splitlm.bench.figure import Figure, Goal, figure, ratios
from splitlm.bench.streamed import hop, streamed
from splitlm.bench.windows import WINDOWS

HOP_SAMPLES = 300
TOY_BLOCKS = 6
LEAST_PACE_MS = 5.0
"""Per block of a simulated device: 10 ms per stage, so that hops of under a millisecond do not decide the figure."""


def stream(plan: Plan) -> list[Figure]:
    """One stream through a ring of three against the uncut model, and where its time goes."""
    with plan.arms() as arms:
        ring = arms.ring(stages=STAGES, trace=str(plan.work / "stream"))
        uncut, echo = arms.uncut(), arms.start("echo")
        bare = arms.start("bare-ring", model=plan.model, dtype=plan.dtype, cuts=ring.told["cuts"])
        hops: list[float] = []

        def bare_rate() -> float:
            took = bare.run(tokens=plan.tokens)
            hops.append(took["hop_ms"])
            return float(took["tokens"]) / float(took["seconds"])

        samples = arms.turns(
            {
                "ring": lambda: ring.rate(tokens=plan.tokens),
                "uncut": lambda: uncut.rate(tokens=plan.tokens),
                "bare": bare_rate,
                "echo": lambda: float(echo.run(size=plan.frame_bytes, count=HOP_SAMPLES)["ms"]),
            }
        )
        seen = ring.run("finish")
    p50 = seen["hops"][0]
    unit = sorted(samples["echo"])[len(samples["echo"]) // 2]
    each = ", ".join(f"{name} {ms:.3f} ms" for name, ms in seen["each_hop"].items())
    bare_hop = sorted(hops)[len(hops) // 2]
    return [
        *streamed(samples, ring.told["cuts"], seen, "exact fp32", Goal(">=", 0.95, 0.97)),
        figure("stream-bare", "our ring ÷ the bare-socket ring", ratios(samples, "ring", "bare")),
        hop(seen, Goal("<=", 0.3, 0.2), f"medians: {each}; bare-socket ring {bare_hop:.3f} ms"),
        figure(
            "hop-echo",
            f"the same hop ÷ one way of a bare echo of {plan.frame_bytes} bytes",
            [p50 / ms for ms in samples["echo"]],
            note=f"bare echo {unit:.4f} ms, back to back",
        ),
        figure(
            "laps",
            "recv_wait + queue + compute + send against the head's lap, sums over a session: difference, per stage",
            [100 * error for error in seen["lap_errors"].values()],
            unit="%",
            goal=Goal("<=", 5),
        ),
        *(
            figure(
                f"laps-{name}",
                f"the same of single laps, {name} over them, per stage (a wait counts with the step that ends it)",
                [100 * errors[index] for errors in seen["single_laps"].values()],
                unit="%",
            )
            for index, name in enumerate(("p50", "p99"))
        ),
    ]


def uncut(plan: Plan) -> list[Figure]:
    """Our uncut loop against transformers' ``generate``."""
    with plan.arms() as arms:
        ours = arms.uncut()
        theirs = arms.start("generate", model=plan.model, dtype=plan.dtype)
        sides = {"ours": lambda: ours.rate(tokens=plan.tokens), "generate": lambda: theirs.rate(tokens=plan.tokens)}
        samples = arms.turns(sides)
    text = "our uncut loop ÷ transformers generate, tokens/s, exact, greedy, same threads"
    return [figure("uncut", text, ratios(samples, "ours", "generate"), goal=Goal(">=", 1.0))]


def cores(plan: Plan) -> list[Figure]:
    """Two stages on a core each: two sessions against one, beside what the two cores can do at all."""
    core = sorted(os.sched_getaffinity(0))[:2]
    if len(core) < 2:
        plan.say("cores: left out, this machine has one core")
        return []
    with plan.arms() as arms:
        ring = arms.ring(stages=2, pins=core)
        alone = [arms.uncut(core=number) for number in core]

        def both() -> float:
            for arm in alone:
                arm.ask(tokens=plan.tokens)
            took = [arm.answer() for arm in alone]
            return sum(int(t["tokens"]) for t in took) / max(float(t["seconds"]) for t in took)

        samples = arms.turns(
            {
                "one session": lambda: ring.rate(tokens=plan.tokens),
                "two sessions": lambda: ring.rate(tokens=plan.tokens, sessions=2),
                "one core": lambda: sum(arm.rate(tokens=plan.tokens) for arm in alone) / 2,
                "two cores": both,
            }
        )
    return [
        figure(
            "cores",
            "2 stages, one core each, 2 sessions ÷ 1, tokens/s, exact fp32, one session per forward",
            ratios(samples, "two sessions", "one session"),
            goal=Goal(">=", 1.8, 1.9),
            note=f"cut {ring.told['cuts'][0]}",
        ),
        figure(
            "cores-ceiling",
            "two independent uncut processes, one core each ÷ one of them",
            ratios(samples, "two cores", "one core"),
        ),
    ]


def devices(plan: Plan) -> list[Figure]:
    """Three simulated devices: four sessions against one."""
    with plan.arms() as arms:
        real = arms.start("uncut", model=plan.toy(TOY_BLOCKS))
        real.rate(tokens=plan.tokens)
        block_ms = 1e3 / real.rate(tokens=plan.tokens) / TOY_BLOCKS
        pace = max(LEAST_PACE_MS, 6 * block_ms)
        ring = arms.start("ring", model=plan.toy(TOY_BLOCKS), cuts=[2, 4], pace_ms=pace)
        samples = arms.turns(
            {
                "one": lambda: ring.rate(tokens=plan.tokens),
                "four": lambda: ring.rate(tokens=plan.tokens, sessions=4),
            }
        )
    return [
        figure(
            "devices",
            "3 stages on simulated devices, 4 sessions ÷ 1, tokens/s",
            ratios(samples, "four", "one"),
            goal=Goal(">=", 2.7),
            note=f"each block takes {pace:.1f} ms, {pace / block_ms:.1f} × its real time on this machine",
        )
    ]


def trace(plan: Plan) -> list[Figure]:
    """What tracing costs."""
    with plan.arms() as arms:
        on, off = arms.ring(stages=STAGES, trace=str(plan.work / "traced")), arms.ring(stages=STAGES)
        sides = {"on": lambda: on.rate(tokens=plan.tokens), "off": lambda: off.rate(tokens=plan.tokens)}
        samples = arms.turns(sides)
    text = f"ring of {STAGES}, trace on ÷ off, tokens/s"
    return [figure("trace", text, ratios(samples, "on", "off"), goal=Goal(">=", 0.99))]


def private(plan: Plan) -> list[Figure]:
    """What it costs to keep norm and head on the asker's machine."""
    with plan.arms() as arms:
        closed, plain = arms.ring(stages=STAGES, private=True), arms.ring(stages=STAGES)
        sides = {"private": lambda: closed.rate(tokens=plan.tokens), "plain": lambda: plain.rate(tokens=plan.tokens)}
        samples = arms.turns(sides)
    text = f"private ring of {STAGES} ÷ plain ring, tokens/s, one stream"
    return [figure("private", text, ratios(samples, "private", "plain"))]


COMPARISONS: Comparisons = {
    "stream": Comparison(stream),
    "uncut": Comparison(uncut),
    "cores": Comparison(cores),
    "devices": Comparison(devices, toy=True),
    "trace": Comparison(trace),
    "private": Comparison(private),
    "windows": WINDOWS,
}
