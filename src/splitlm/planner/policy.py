"""Stay, or move to a new cut: a pure step from what the last windows measured.

Each window's median compute per node, divided by what the profile predicts for the current cut, is that device's
*drift*; a drifted profile plans like any other. A move is decided when one cut is better in every one of the last
``confirm`` windows, each taken alone, by more than the noise between windows explains, and when it saves more over the
horizon than it costs. So a single slow window moves nothing, nor does noise that goes up and down.
"""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean, median

import msgspec

from splitlm.core.cut import Cut
from splitlm.core.errors import CutError, UsageError
from splitlm.planner.cost import Prediction, Ring, predict
from splitlm.planner.partition import partition

HISTORY = 12
"""Windows kept; noise is estimated from them."""
LONGEST_REST = 64
"""Windows between two moves that undo each other, at most."""
PRIOR_NOISE, PRIOR_STEPS = 0.07, 6
"""Noise that is taken for granted, and the number of measured steps that it counts for."""
OUTLIER = 4.0
"""A step so many times larger than a node's others is a change, and no noise."""
MEAN_STEP = 2 / math.sqrt(math.pi)
"""Mean size of the step between two normal samples, in standard deviations of one."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What one window measured.

    Attributes:
        compute_ms: per node, the median over its decode steps of compute for one token (all its segments).
        hop_ms: per link, beyond compute; empty where it was not measured: then the profile's links count.
        sessions: that decoded.
    """

    compute_ms: tuple[float, ...]
    hop_ms: tuple[float, ...] = ()
    sessions: int = 1


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """When a move is worth it.

    Attributes:
        gain: least share of the time per token that a move must save.
        noise: standard errors of the measured noise that it must exceed as well.
        confirm: windows in a row that must agree.
        rest: windows after a move in which nothing is decided; doubled by each move back.
        step: blocks that a boundary moves in a careful step. The whole way is weighed against it; it ends, too, where a
            block would pass a neighbour.
    """

    gain: float = 0.1
    noise: float = 4.0
    confirm: int = 2
    rest: int = 3
    step: int = 1

    def __post_init__(self) -> None:
        for name, value, good in (
            ("gain", self.gain, 0 < self.gain < 1),
            ("noise", self.noise, self.noise >= 0),
            ("confirm", self.confirm, 1 <= self.confirm <= HISTORY),
            ("rest", self.rest, self.rest >= 0),
            ("step", self.step, self.step >= 1),
        ):
            if not good:
                raise UsageError(f"{name} is {value}", where=f"plan.{name}", expected="a value in its range")


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """What a move is expected to cost, in milliseconds of a ring that stands still.

    Attributes:
        move_ms: a commit that moves anything, over one that does not.
        block_pause_ms: the rest of one block's KV, installed within the barrier.
        block_background_ms: what decoding loses while one block is brought in the background.
    """

    move_ms: float = 2.0
    block_pause_ms: float = 2.0
    block_background_ms: float = 50.0

    def of(self, moved: int) -> float:
        """The price of moving so many blocks; nothing for none."""
        return self.move_ms + moved * (self.block_pause_ms + self.block_background_ms) if moved else 0.0


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy remembers from window to window.

    Attributes:
        windows: of the current cut, the newest last.
        rest: windows in which nothing will be decided.
        before: the cut that the last move left.
        rested: how long the rest after the last move was.
    """

    windows: tuple[Observation, ...] = ()
    rest: int = 0
    before: Cut | None = None
    rested: int = 0


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Stay or move. Times are per token of all sessions together.

    Attributes:
        cut: the new cut, its epoch one higher; None to stay.
        reason: in words.
        now_ms: predicted from the windows for the current cut; what was measured if the model is right.
        predicted_ms: for the cut to come, or again ``now_ms``.
        needed_gain: share of ``now_ms`` that a move had to save.
        moved: blocks that change their node.
        price_ms: what the move is expected to cost.
    """

    cut: Cut | None
    reason: str
    now_ms: float
    predicted_ms: float
    needed_gain: float = 0.0
    moved: int = 0
    price_ms: float = 0.0

    @property
    def gain(self) -> float:
        """Share of the time per token that is saved."""
        return 1 - self.predicted_ms / self.now_ms


def decide(
    state: State,
    ring: Ring,
    cut: Cut,
    window: Observation,
    *,
    horizon: int,
    settings: Settings | None = None,
    price: Price | None = None,
) -> tuple[State, Decision]:
    """One window's end.

    Args:
        state: what the last call returned, ``State()`` at first.
        ring: profiles and order of the devices; times need only be right relative to each other within one device.
        cut: the current one.
        window: what was measured under it.
        horizon: tokens still expected, of all sessions together.

    Raises:
        CutError: cut or window do not fit the ring.
    """
    settings, price = settings or Settings(), price or Price()
    windows = (*state.windows, window)[-HISTORY:]
    recent = windows[-settings.confirm :]
    now = predict(drifted(ring, cut, _typical(recent)), cut)
    state = msgspec.structs.replace(state, windows=windows, rest=max(0, state.rest - 1))

    def stay(reason: str, needed: float = 0.0) -> tuple[State, Decision]:
        return state, Decision(
            cut=None, reason=reason, now_ms=now.token_ms, predicted_ms=now.token_ms, needed_gain=needed
        )

    if state.rest:
        return stay(f"rests for {state.rest} more windows after a move")
    if len(recent) < settings.confirm:
        return stay(f"{len(recent)} of {settings.confirm} windows measured")
    view = drifted(ring, cut, _typical(recent))
    try:
        target = partition(view)
    except CutError as error:
        return stay(f"no cut fits: {error.what}")
    needed = max(settings.gain, settings.noise * noise(windows) / math.sqrt(settings.confirm))
    if target.boundaries == cut.boundaries:
        return stay("the cut is the best there is", needed)
    scenes = [drifted(ring, cut, w) for w in recent]
    # Whether there is a direction to go in is asked of the whole way: a first step alone may hide in the noise.
    if (gain := _least_gain(scenes, cut, target)) < needed:
        return stay(f"a move would save {gain:.0%} of the time per token, and {needed:.0%} are asked for", needed)
    options = []
    for reach in (cut.blocks, settings.step):
        try:
            new = partition(view, _reachable(cut, reach))
        except CutError:
            continue  # memory allows no step of this size
        if moved(cut, new) and _least_gain(scenes, cut, new) > 0:
            options.append(new)
    if not options:
        return stay("no step towards a better cut is one by itself", needed)

    def saved_ms(option: Cut) -> float:
        return horizon * (now.token_ms - predict(view, option).token_ms) - price.of(moved(cut, option))

    chosen = max(options, key=saved_ms)
    if saved_ms(chosen) <= 0:
        return stay(f"a move costs more than it saves within {horizon} tokens", needed)
    then, count = predict(view, chosen), moved(cut, chosen)
    # A load that comes and goes would pull blocks to and fro: each step back doubles the rest.
    back = state.before is not None and moved(state.before, chosen) < moved(state.before, cut)
    rest = min(LONGEST_REST, 2 * max(1, state.rested)) if back else settings.rest
    return State(rest=rest + 1, before=cut, rested=rest), Decision(
        cut=msgspec.structs.replace(chosen, epoch=cut.epoch + 1),
        reason=f"{_busiest(now, ring)} is the slowest; {count} blocks move",
        now_ms=now.token_ms,
        predicted_ms=then.token_ms,
        needed_gain=needed,
        moved=count,
        price_ms=price.of(count),
    )


def drifted(ring: Ring, cut: Cut, window: Observation) -> Ring:
    """The ring as a window found it: each device slower or faster as a whole, links and sessions as measured.

    Raises:
        CutError: the window is not of this ring, or holds a time that is not positive.
    """
    plain = predict(ring, cut)
    good = len(window.compute_ms) == len(ring.devices) and len(window.hop_ms) in (0, len(ring.links))
    if not good or not all(0 < ms < math.inf for ms in window.compute_ms):
        raise CutError(
            f"A window measured {list(window.compute_ms)} ms of compute and {len(window.hop_ms)} links",
            expected=f"a positive time for each of {len(ring.devices)} nodes, and {len(ring.links)} links or none",
        )
    devices = tuple(
        msgspec.structs.replace(
            device,
            **{key: getattr(device, key) * ms / was for key in ("block_ms", "embed_ms", "head_ms", "fixed_ms")},
        )
        for device, ms, was in zip(ring.devices, window.compute_ms, plain.compute_ms, strict=True)
    )
    # Only the sum of latency and transmission was measured: keep the profile's rate, and let the latency give.
    links = tuple(
        msgspec.structs.replace(link, latency_ms=max(0.0, ms - busy))
        for link, ms, busy in zip(ring.links, window.hop_ms or ring.hop_ms, ring.busy_ms, strict=True)
    )
    return msgspec.structs.replace(ring, devices=devices, links=links, sessions=window.sessions)


def noise(windows: tuple[Observation, ...]) -> float:
    """Relative standard deviation of a node's time between windows.

    From the mean step from each window to the next. A lasting change of a device is one step that stands out, and is
    left out. Few steps count little beside a prior.
    """
    total, count = PRIOR_NOISE * PRIOR_STEPS, PRIOR_STEPS
    for times in zip(*(window.compute_ms for window in windows), strict=True):
        steps = sorted(abs(math.log(after / before)) for before, after in pairwise(times))
        if len(steps) > 1 and steps[-1] > OUTLIER * fmean(steps[:-1]):
            steps.pop()
        total += sum(steps) / MEAN_STEP
        count += len(steps)
    return total / count


def moved(old: Cut, new: Cut) -> int:
    """Blocks that change their node."""
    owner = [node for part, node in zip(old.segments, old.nodes, strict=True) for _ in part.blocks]
    other = [node for part, node in zip(new.segments, new.nodes, strict=True) for _ in part.blocks]
    return sum(a != b for a, b in zip(owner, other, strict=True))


def _typical(windows: tuple[Observation, ...]) -> Observation:
    """Medians over windows."""
    hops = [w.hop_ms for w in windows if w.hop_ms]
    return Observation(
        compute_ms=tuple(median(column) for column in zip(*(w.compute_ms for w in windows), strict=True)),
        hop_ms=tuple(median(column) for column in zip(*hops, strict=True)),
        sessions=windows[-1].sessions,
    )


def _least_gain(scenes: list[Ring], old: Cut, new: Cut) -> float:
    return min(1 - predict(scene, new).token_ms / predict(scene, old).token_ms for scene in scenes)


def _reachable(cut: Cut, reach: int) -> list[tuple[int, int]]:
    """Where each boundary between nodes may go at once: ``reach`` blocks, and no block past a neighbour."""
    edges = (0, *cut.boundaries, cut.blocks)
    count = len(cut.boundaries) - cut.private
    return [(max(edges[i - 1], edges[i] - reach), min(edges[i + 1], edges[i] + reach)) for i in range(1, count + 1)]


def _busiest(prediction: Prediction, ring: Ring) -> str:
    return ring.devices[max(range(len(ring.devices)), key=lambda node: prediction.compute_ms[node])].name
