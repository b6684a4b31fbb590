"""The policy against simulated rings: it keeps still under noise, moves when a device changes, and counts the price."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitlm.core.cut import Cut, diff, make_cut
from splitlm.core.errors import CutError, UsageError
from splitlm.core.profile import DeviceProfile, Identity, LinkProfile, ModelProfile
from splitlm.planner.cost import Ring, predict
from splitlm.planner.partition import partition
from splitlm.planner.policy import Decision, Observation, Price, Settings, State, decide, drifted, moved, noise

WHO = Identity(config_hash="c", dtype="float32", compute="exact")
LOAD = Callable[[int, int], float]
"""(window, node) → how many times slower than its profile the node is."""


def ring(stages: int = 3, blocks: int = 30, *, private: bool = False, memory: int = 10**9, **times: float) -> Ring:
    names = [f"d{i}" for i in range(stages)]
    return Ring(
        model=ModelProfile(
            name="m",
            identity=WHO,
            blocks=blocks,
            block_bytes=100,
            embed_bytes=0,
            head_bytes=0,
            kv_bytes=0,
            hidden_bytes=1000,
        ),
        devices=tuple(
            DeviceProfile(name=n, measured=WHO, memory_bytes=memory, **{"block_ms": 1.0, **times})  # type: ignore[arg-type]
            for n in names
        ),
        links=tuple(
            LinkProfile(source=a, target=b, latency_ms=0.2, bytes_per_s=1e8)
            for a, b in zip(names, [*names[1:], names[0]], strict=True)
        ),
        private=private,
    )


def measure(plain: Ring, cut: Cut, load: list[float], sessions: int) -> Observation:
    """What a window of the real ring shows."""
    ms = predict(plain, cut).compute_ms
    return Observation(compute_ms=tuple(m * x for m, x in zip(ms, load, strict=True)), sessions=sessions)


def real_ms(plain: Ring, cut: Cut, load: list[float], sessions: int) -> float:
    return predict(drifted(plain, cut, measure(plain, cut, load, sessions)), cut).token_ms


def simulate(
    plain: Ring, windows: int, load: LOAD, *, sessions: int = 3, horizon: int = 1000, rules: Settings | None = None
) -> tuple[Cut, list[tuple[int, Decision]]]:
    """The last cut, and every move with the window at whose end it was decided."""
    cut = partition(msgspec.structs.replace(plain, sessions=sessions))
    state, moves = State(), []
    for w in range(windows):
        seen = measure(plain, cut, [load(w, n) for n in range(len(plain.devices))], sessions)
        state, said = decide(state, plain, cut, seen, horizon=horizon, settings=rules)
        if said.cut is not None:
            assert said.cut.epoch == cut.epoch + 1
            assert (said.cut.private, said.cut.blocks) == (cut.private, cut.blocks)
            assert len(diff(cut, said.cut)) == said.moved > 0
            moves.append((w, said))
            cut = said.cut
    return cut, moves


@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("sessions", [1, 3])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32), head_ms=st.sampled_from([0.0, 4.0]))
def test_noise_of_ten_per_cent_moves_nothing(kind: str, sessions: int, seed: int, head_ms: float) -> None:
    dice = random.Random(seed)
    draw = {"uniform": lambda: dice.uniform(0.9, 1.1), "normal": lambda: max(0.5, dice.gauss(1, 0.1))}[kind]
    _, moves = simulate(ring(head_ms=head_ms), 50, lambda w, n: draw(), sessions=sessions, horizon=10**6)
    assert moves == []


def test_that_noise_would_move_blocks_without_hysteresis() -> None:
    """The test above is about the hysteresis: the same noise moves a policy that has none."""
    dice = random.Random(1)
    bold = Settings(gain=0.01, noise=0, confirm=1, rest=0)
    _, moves = simulate(ring(), 50, lambda w, n: dice.uniform(0.9, 1.1), horizon=10**6, rules=bold)
    assert len(moves) > 10


@pytest.mark.parametrize("slow", [0, 1, 2])
@pytest.mark.parametrize("onset", [0, 1, 7, 20])
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_stage_at_half_speed_is_relieved_within_two_windows(slow: int, onset: int, seed: int) -> None:
    dice = random.Random(seed)
    plain = ring()
    load = [2.0 if n == slow else 1.0 for n in range(3)]
    start = partition(msgspec.structs.replace(plain, sessions=3))
    end, moves = simulate(
        plain, onset + 2, lambda w, n: (load[n] if w >= onset else 1.0) * dice.uniform(0.98, 1.02), horizon=2000
    )
    assert [w for w, _ in moves] == [onset + 1]
    assert real_ms(plain, start, load, 3) / real_ms(plain, end, load, 3) >= 1.25
    said = moves[0][1]
    assert said.predicted_ms == pytest.approx(real_ms(plain, end, load, 3), rel=0.05)
    assert said.now_ms == pytest.approx(real_ms(plain, start, load, 3), rel=0.05)
    assert said.gain >= 0.2
    assert f"d{slow}" in said.reason


def test_it_settles_after_the_move() -> None:
    dice = random.Random(3)
    load = [1.0, 2.0, 1.0]
    _, moves = simulate(ring(), 60, lambda w, n: load[n] * dice.uniform(0.9, 1.1))
    assert len(moves) == 1


def test_one_slow_window_moves_nothing() -> None:
    _, moves = simulate(ring(), 30, lambda w, n: 3.0 if n == 1 and w % 5 == 4 else 1.0, horizon=10**6)
    assert moves == []


def test_a_load_that_comes_and_goes_moves_blocks_ever_more_rarely() -> None:
    _, moves = simulate(ring(), 120, lambda w, n: 3.0 if n == 1 and w // 6 % 2 else 1.0, horizon=10**6)
    at = [w for w, _ in moves]
    gaps = [b - a for a, b in pairwise(at)]
    assert 2 <= len(moves) <= 8
    assert gaps[-1] >= 4 * gaps[0]


def test_it_rests_after_a_move() -> None:
    plain, rules = ring(), Settings(rest=5)
    worse = lambda w, n: 2.0 if n == 1 and w >= 0 else (4.0 if n == 0 and w >= 2 else 1.0)  # noqa: E731
    _, moves = simulate(plain, 20, worse, rules=rules)
    assert [w for w, _ in moves] == [1, 1 + 5 + 1]


def test_a_short_horizon_does_not_pay() -> None:
    plain, cut = ring(), make_cut(30, (10, 20))
    slow = measure(plain, cut, [1, 2, 1], 3)
    state, _ = decide(State(), plain, cut, slow, horizon=20)
    _, short = decide(state, plain, cut, slow, horizon=20)
    _, long = decide(state, plain, cut, slow, horizon=2000)
    assert short.cut is None
    assert "costs more than it saves within 20 tokens" in short.reason
    assert long.cut is not None
    assert long.price_ms == Price().of(long.moved) < 2000 * (long.now_ms - long.predicted_ms)


def test_a_middling_horizon_pays_for_a_careful_step_only() -> None:
    """The first four blocks save 3 ms per token each, the last two 2.5; each costs 100 ms."""
    plain, cut = ring(), make_cut(30, (10, 20))
    slow = measure(plain, cut, [1, 3, 1], 3)
    steep = Price(move_ms=0, block_pause_ms=0, block_background_ms=100)
    state, _ = decide(State(), plain, cut, slow, horizon=1)
    step, whole = (
        decide(state, plain, cut, slow, horizon=h, settings=Settings(step=2), price=steep)[1].cut for h in (36, 2000)
    )
    assert step is not None and step.boundaries == (12, 18)
    assert whole is not None and whole.boundaries == (13, 17)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.3, 4), min_size=4, max_size=4),
    st.integers(1, 4),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 3000),
)
def test_a_move_never_predicts_worse_and_always_pays(
    load: list[float], step: int, sessions: int, private: bool, horizon: int
) -> None:
    plain = ring(4, 17, private=private)
    cut = partition(msgspec.structs.replace(plain, sessions=sessions))
    seen = measure(plain, cut, load, sessions)
    state, first = decide(State(), plain, cut, seen, horizon=horizon, settings=Settings(step=step))
    assert first.cut is None
    _, said = decide(state, plain, cut, seen, horizon=horizon, settings=Settings(step=step))
    if said.cut is None:
        assert said.predicted_ms == said.now_ms
        return
    assert horizon * (said.now_ms - said.predicted_ms) > said.price_ms > 0
    assert said.moved == moved(cut, said.cut) > 0
    assert predict(drifted(plain, cut, seen), said.cut).token_ms == pytest.approx(said.predicted_ms)


def test_memory_bounds_a_move() -> None:
    plain = ring(memory=1100)
    end, moves = simulate(plain, 2, lambda w, n: [1.0, 2.0, 1.0][n])
    assert len(moves) == 1
    assert [part.count for part in end.segments] == [11, 8, 11]


@pytest.mark.parametrize(
    ("edges", "load"), [((2, 4, 6), [1.0, 30.0, 30.0, 30.0]), ((34, 36, 38), [30.0, 30.0, 30.0, 1.0])]
)
def test_a_long_way_goes_by_steps_that_pass_no_neighbour(edges: tuple[int, ...], load: list[float]) -> None:
    """Most blocks belong on one end and are on the other; ``diff`` refuses a block that skips a node."""
    plain, cut, state, seen = ring(4, 40), make_cut(40, edges), State(), []
    for _ in range(30):
        state, said = decide(state, plain, cut, measure(plain, cut, load, 4), horizon=10**6)
        if said.cut is not None:
            assert diff(cut, said.cut)
            cut = said.cut
            seen.append(cut.boundaries)
    view = drifted(plain, cut, measure(plain, cut, load, 4))
    assert len(seen) > 1
    # Where every next step would only pass the same two blocks on, it stays.
    assert predict(view, cut).token_ms <= 60 < predict(view, make_cut(40, edges)).token_ms


def test_one_stream_moves_only_where_the_sum_shrinks() -> None:
    """With one session balance is worth nothing: all that can goes to the faster ones."""
    end, moves = simulate(ring(memory=2000), 2, lambda w, n: [1.0, 2.0, 1.0][n], sessions=1)
    assert len(moves) == 1
    assert end.segments[1].count == 1
    assert moves[0][1].predicted_ms == pytest.approx(29 + 2 + 0.6 + 0.02, abs=0.01)


def test_measured_links_take_the_place_of_the_profiles() -> None:
    plain, cut = ring(), make_cut(30, (10, 20))
    seen = Observation(compute_ms=(10, 10, 10), hop_ms=(5.0, 6.0, 7.0), sessions=1)
    assert drifted(plain, cut, seen).hop_ms == pytest.approx((5, 6, 7))
    assert drifted(plain, cut, Observation(compute_ms=(10, 10, 10))).hop_ms == pytest.approx(plain.hop_ms)


def test_noise_is_that_of_the_windows_and_not_a_lasting_change() -> None:
    dice = random.Random(5)
    noisy = tuple(Observation(compute_ms=tuple(dice.gauss(1, 0.1) for _ in range(40))) for _ in range(12))
    assert noise(noisy) == pytest.approx(0.1, abs=0.015)
    jump, calm = (tuple(Observation(compute_ms=(1.0, x if i > 3 else 1.0, 1.0)) for i in range(12)) for x in (2.0, 1.0))
    assert noise(jump) == pytest.approx(noise(calm), abs=0.001)
    assert noise(calm) < 0.02
    assert noise(noisy[:1]) == pytest.approx(0.07)


@pytest.mark.parametrize(
    "window",
    [
        Observation(compute_ms=(1.0, 1.0)),
        Observation(compute_ms=(1.0, 1.0, 0.0)),
        Observation(compute_ms=(1.0, 1.0, float("nan"))),
        Observation(compute_ms=(1.0, 1.0, 1.0), hop_ms=(1.0,)),
        Observation(compute_ms=(1.0, 1.0, 1.0), sessions=0),
    ],
)
def test_a_window_of_another_ring_is_refused(window: Observation) -> None:
    with pytest.raises(CutError):
        decide(State(), ring(), make_cut(30, (10, 20)), window, horizon=10)


@pytest.mark.parametrize("wrong", [{"gain": 0.0}, {"confirm": 0}, {"rest": -1}, {"step": 0}, {"noise": -1.0}])
def test_settings_out_of_range_are_named(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError) as failed:
        Settings(**wrong)  # type: ignore[arg-type]
    assert f"plan.{next(iter(wrong))}" in str(failed.value)
