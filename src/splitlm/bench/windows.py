"""The figures of windows in which nothing moves: what the barrier takes, and what it costs in tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from splitlm.bench import laps
from splitlm.bench.comparison import PROMPT_TOKENS, STAGES, Comparison, Plan
from splitlm.bench.figure import Figure, Goal, figure, ratios
from splitlm.core.errors import SplitlmError
from splitlm.telemetry.summary import percentile

WINDOW = 20
TURNS = 3
"""Turns per repetition: a hundredth is looked for, and many short pairs hide less of it than few long ones."""
MESSAGE_BYTES = 128
"""About the size of a barrier's message."""
ECHOES = 300


def windows(plan: Plan) -> list[Figure]:
    """Noop windows against no windows, and the barrier between them by itself."""
    tokens = _tokens(plan.tokens)
    with plan.arms() as arms:
        folder = plan.work / "windows"
        ring = arms.ring(stages=STAGES, window=WINDOW, trace=str(folder))
        plain = arms.ring(stages=STAGES, window=0, trace=str(plan.work / "no-windows"))
        echo = arms.start("echo")
        samples = arms.turns(
            {
                "windows": lambda: ring.rate(tokens=tokens),
                "none": lambda: plain.rate(tokens=tokens),
                "echo": lambda: float(echo.run(size=MESSAGE_BYTES, count=ECHOES)["ms"]),
            },
            TURNS,
        )
        ring.run("finish")
    records = laps.read(folder)
    stages, head = laps.protocol(records)
    made = laps.generations(records, WINDOW)
    gaps = [ms - one.ordinary for one in made for ms in one.noops]
    if not stages or not gaps:
        raise SplitlmError(f"No barrier was recorded in {tokens} tokens", where=str(folder))
    trip, unit = 2 * median(samples["echo"]), median(stages)
    lap = median(one.ordinary for one in made)
    return [
        figure(
            "windows",
            f"windows of {WINDOW} without a move ÷ no windows, tokens/s, ring of {STAGES}, one stream",
            ratios(samples, "windows", "none"),
            goal=Goal(">=", 0.99),
        ),
        figure(
            "windows-laps",
            "the same from the laps of the ring with windows: those with a barrier against those without",
            [WINDOW * one.ordinary / ((WINDOW - 1) * one.ordinary + median(one.noops)) for one in made],
            goal=Goal(">=", 0.99),
            note=f"a barrier adds {median(gaps):.2f} ms to its lap of {lap:.2f} ms (median of {len(gaps)})",
        ),
        typical("barrier", "barrier, protocol alone, on a stage: PREPARE to DONE, p50 (p10–p90)", stages),
        typical("barrier-head", "the same on the head: PREPARE to the last stage's DONE, p50 (p10–p90)", head),
        figure(
            "barrier-echo",
            f"the stages' median ÷ round trips of a bare echo of {MESSAGE_BYTES} bytes",
            [unit / (2 * ms) for ms in samples["echo"]],
            note=f"bare echo there and back {trip:.4f} ms, back to back",
        ),
    ]


def typical(name: str, text: str, values: Sequence[float]) -> Figure:
    """A barrier's figure: among hundreds of them the least and the largest say little."""
    low, middle, high = (percentile(values, q) for q in (10, 50, 90))
    goal = Goal("<=", 1.0, 0.5)
    return Figure(name=name, text=text, value=middle, low=low, high=high, count=len(values), unit="ms", goal=goal)


def _tokens(asked: int) -> int:
    """New tokens of a text: it has two windows at least."""
    return max(asked, 2 * WINDOW + 2)


WINDOWS = Comparison(windows, lambda tokens: PROMPT_TOKENS + _tokens(tokens))
