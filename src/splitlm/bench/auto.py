"""The figures of a ring that moves blocks by itself: three simulated devices, one slower than the plan thought."""

from __future__ import annotations

import time
from itertools import combinations
from pathlib import Path
from typing import Any

from splitlm.bench.arm import Arm
from splitlm.bench.comparison import PROMPT_TOKENS, STAGES, Comparison, Plan
from splitlm.bench.figure import Figure, Goal, figure, ratios
from splitlm.bench.windows import WINDOW
from splitlm.planner import policy
from splitlm.planner.cost import predict

BLOCKS, CUTS, SESSIONS = 12, (4, 8), 3
SLOWDOWN, SLOW = 2.0, 1
"""How many times slower which stage is."""
QUIET = 50
"""Windows in which nothing may move where no stage is slow."""
IN_TIME = 3
"""Windows after which the blocks must have moved."""
TOKENS = (IN_TIME + 1) * WINDOW + 2
LONGEST = 20 * WINDOW + 2
"""Tokens of a quiet generation: the toy's context holds no more."""
HORIZON = 2000


def auto(plan: Plan) -> list[Figure]:
    """Three simulated stages, one twice as slow: a ring that moves blocks by itself against one that does not."""
    with plan.arms() as arms:
        pace = _pace(arms.start("uncut", model=plan.toy(BLOCKS)), plan.tokens)
        paces = [pace * (SLOWDOWN if node == SLOW else 1.0) for node in range(len(CUTS) + 1)]
        given: dict[str, Any] = {"model": plan.toy(BLOCKS), "cuts": CUTS, "window": WINDOW, "horizon": HORIZON}
        moving = arms.start("ring", **given, plan="auto", pace_ms=paces)
        unmoved = arms.start("ring", **given, pace_ms=paces)
        even = arms.start("ring", **given, plan="auto", pace_ms=[pace] * len(paces))
        # The first turn, which does not count, is the one in which the blocks move.
        samples = arms.turns({"auto": lambda: _rate(moving), "unmoved": lambda: _rate(unmoved)})
        told = moving.run("windows")
        quiet: dict[str, Any] = {"ended": 0}
        while quiet["ended"] < QUIET:
            even.run(tokens=LONGEST, sessions=SESSIONS)
            quiet = even.run("windows")
            plan.say(f"nothing is slow: {quiet['ended']} of {QUIET} windows, {len(quiet['moves'])} moves")
    return [
        *_figures(ratios(samples, "auto", "unmoved"), paces, told, quiet),
        figure(
            "auto-decide",
            "price of one decision for the model, in a thread beside the tokens: nothing is slow, or one stage is",
            deciding_ms(Path(plan.model)),
            unit="ms",
        ),
    ]


def _pace(real: Arm, tokens: int) -> float:
    """Milliseconds per block that leave the real forward little of its step."""
    real.rate(tokens=tokens)
    return max(2.0, 6e3 / real.rate(tokens=tokens) / BLOCKS)


def _rate(ring: Arm) -> float:
    return ring.rate(tokens=TOKENS, sessions=SESSIONS)


def _figures(gains: list[float], paces: list[float], told: dict[str, Any], quiet: dict[str, Any]) -> list[Figure]:
    best, moves = ideal(paces), told["moves"]
    words = ", ".join(f"{count} after window {number}" for number, _, count in moves) or "none"
    found = [
        figure(
            "auto",
            f"{SESSIONS} sessions, one of three equal stages slowed {SLOWDOWN:g} ×: "
            "tokens/s with --plan auto, once it has moved blocks ÷ the unmoved cut",
            gains,
            goal=Goal(">=", round(0.9 * best, 2), round(best, 2)),
            note=f"moves: {words}; cut {told['cuts']}; at best {best:.2f} ×, and nine tenths of it are asked for",
        )
    ]
    if moves:
        found.append(
            figure(
                "auto-window",
                "the window after which blocks moved first",
                [moves[0][0]],
                unit="",
                goal=Goal("<=", IN_TIME),
            )
        )
    found.append(
        figure(
            "auto-quiet",
            f"moves in {quiet['ended']} windows where no stage is slow",
            [len(quiet["moves"])],
            unit="",
            goal=Goal("<=", 0),
        )
    )
    return found


def deciding_ms(model: Path, calls: int = 10) -> list[float]:
    """Milliseconds of the policy's step at the end of a window, for a ring of three of this model.

    Every other call finds the first stage slow, and weighs what to move.
    """
    from splitlm.model.load import ModelFiles
    from splitlm.node.auto import assumed
    from splitlm.node.settings import RingSettings, choose_cut

    settings, files = RingSettings(str(model), model, stages=STAGES), ModelFiles(model)
    cut = choose_cut(files, settings)
    ring = assumed(settings, files, cut)
    plain = predict(ring, cut).compute_ms
    even = policy.Observation(compute_ms=plain)
    slow = policy.Observation(compute_ms=(SLOWDOWN * plain[0], *plain[1:]))
    took = []
    for call in range(calls):
        window = slow if call % 2 else even
        state = policy.State(windows=(window,) * policy.HISTORY)
        began = time.perf_counter()
        policy.decide(state, ring, cut, window, horizon=HORIZON)
        took.append((time.perf_counter() - began) * 1e3)
    return took


def ideal(paces: list[float]) -> float:
    """How many times faster the slowest stage of the best cut is than that of ``CUTS``.

    With as many sessions as stages it is that stage that bounds the tokens per second.
    """

    def slowest(cuts: tuple[int, ...]) -> float:
        edges = (0, *cuts, BLOCKS)
        return max((edges[i + 1] - edges[i]) * pace for i, pace in enumerate(paces))

    return slowest(CUTS) / min(slowest(cuts) for cuts in combinations(range(1, BLOCKS), len(CUTS)))


AUTO = Comparison(auto, lambda tokens: PROMPT_TOKENS + max(tokens, LONGEST), toy=True)
