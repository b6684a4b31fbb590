"""The partition is the best there is (against all cuts), keeps to memory, and says what is missing."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitlm.core.cut import Cut, balanced_boundaries, make_cut
from splitlm.core.errors import CutError
from splitlm.core.profile import DeviceProfile, Identity, LinkProfile, ModelProfile
from splitlm.planner.cost import Prediction, Ring, fits, node_bytes, predict
from splitlm.planner.partition import partition

WHO = Identity(config_hash="c", dtype="float32", compute="exact")


def model(blocks: int = 10, **changed: object) -> ModelProfile:
    given: dict[str, object] = {
        "name": "m",
        "identity": WHO,
        "blocks": blocks,
        "block_bytes": 100,
        "embed_bytes": 300,
        "head_bytes": 310,
        "tied_bytes": 300,
        "kv_bytes": 1,
        "hidden_bytes": 936,
    }
    return ModelProfile(**{**given, **changed})  # type: ignore[arg-type]


def device(name: str, block_ms: float = 1.0, memory: int = 10**9, **changed: float) -> DeviceProfile:
    return DeviceProfile(name=name, measured=WHO, memory_bytes=memory, block_ms=block_ms, **changed)  # type: ignore[arg-type]


def links(names: list[str], latency_ms: float = 0.1, bytes_per_s: float = 1e9) -> tuple[LinkProfile, ...]:
    ends = [*names[1:], names[0]]
    pairs = zip(names, ends, strict=True) if len(names) > 1 else ()
    return tuple(LinkProfile(source=a, target=b, latency_ms=latency_ms, bytes_per_s=bytes_per_s) for a, b in pairs)


def ring(devices: list[DeviceProfile], blocks: int = 10, **changed: object) -> Ring:
    given: dict[str, object] = {"model": model(blocks), "links": links([d.name for d in devices])}
    return Ring(devices=tuple(devices), **{**given, **changed})  # type: ignore[arg-type]


def every_cut(of: Ring) -> list[Cut]:
    low = 0 if of.private else 1
    places = combinations(range(low, of.model.blocks - of.tail_blocks), len(of.devices) - 1)
    return [make_cut(of.model.blocks, b, private=of.private, tail_blocks=of.tail_blocks) for b in places]


def key(p: Prediction) -> tuple[float, float, float]:
    """What is least in the best cut; rounded, for equal sums in another order differ in their last bits."""
    return (round(p.token_ms, 9), round(p.lap_ms, 9), round(max(p.compute_ms), 9))


def test_a_lap_and_its_bottleneck_are_sums_by_hand() -> None:
    r = ring([device("a", 1, embed_ms=0.5, fixed_ms=0.25), device("b", 2, head_ms=3)], sessions=2)
    p = predict(r, make_cut(10, (6,)))
    assert p.compute_ms == pytest.approx((6.75, 11))
    assert p.hop_ms == pytest.approx((0.1 + 0.001, 0.1 + 0.000064))  # 936 + 64 bytes out, 64 home, at 1e9 bytes/s
    assert p.lap_ms == pytest.approx(17.75 + 0.201064)
    assert (p.objective, p.bottleneck_ms, p.token_ms) == ("bottleneck", 11, 11)
    assert p.tokens_per_s == pytest.approx(1000 / 11)


def test_one_session_pays_the_lap_and_too_few_sessions_share_it() -> None:
    three = [device(n) for n in "abc"]
    cut = make_cut(9, (3, 6))
    alone, two, many = (predict(ring(three, 9, sessions=n), cut) for n in (1, 2, 9))
    assert (alone.objective, alone.token_ms) == ("sum", alone.lap_ms)
    assert two.token_ms == pytest.approx(alone.lap_ms / 2)
    assert many.token_ms == many.bottleneck_ms == 3


def test_a_slow_link_is_a_bottleneck_and_its_latency_is_not() -> None:
    two = [device("a"), device("b")]
    slow = ring(two, sessions=9, links=links(["a", "b"], latency_ms=20, bytes_per_s=100_000))
    p = predict(slow, make_cut(10, (5,)))
    assert (p.bottleneck_ms, p.token_ms) == (10, 10)  # 1000 bytes at 100 kB/s
    assert p.lap_ms == pytest.approx(10 + 10 + 0.64 + 40)


def test_a_private_cut_computes_and_holds_both_ends_at_home() -> None:
    r = ring(
        [device("a", 1, embed_ms=0.5, head_ms=3, fixed_ms=0.25), device("b", 2)],
        private=True,
        tail_blocks=1,
        context_tokens=7,
        sessions=2,
    )
    cut = make_cut(10, (2,), private=True, tail_blocks=1)
    p = predict(r, cut)
    assert p.compute_ms == pytest.approx((2 * 0.25 + 3 + 0.5 + 3, 14))
    assert p.hop_ms[1] == pytest.approx(0.1 + 0.001)  # hidden states come home
    assert node_bytes(r, cut) == (3 * (100 + 14) + 300 + 10, 7 * (100 + 14))


def test_memory_counts_a_tied_table_once_on_one_node_and_twice_on_two() -> None:
    assert node_bytes(ring([device("a")]), make_cut(10, ())) == (1000 + 300 + 10,)
    assert node_bytes(ring([device("a"), device("b")]), make_cut(10, (4,))) == (400 + 300, 600 + 310)


def test_a_sliding_block_keeps_no_more_rows_than_its_window() -> None:
    r = ring([device("a")], 3, model=model(3, windows=(0, 4, 200)), context_tokens=100, sessions=2)
    assert node_bytes(r, make_cut(3, ()))[0] - (300 + 300 + 10) == 2 * (100 + 4 + 100)


@pytest.mark.parametrize("private", [False, True])
def test_equal_devices_get_a_balanced_cut_whatever_counts(private: bool) -> None:
    for sessions in (1, 4):
        for stages in (2, 3, 4):
            r = ring([device(f"d{i}", head_ms=2.5) for i in range(stages)], 24, sessions=sessions, private=private)
            found = predict(r, partition(r))
            even = make_cut(24, balanced_boundaries(24, stages, head_cost=2.5, private=private), private=private)
            assert max(found.compute_ms) <= max(predict(r, even).compute_ms) + 1e-9


def test_one_stream_fills_the_fastest_first() -> None:
    r = ring([device("a", 3), device("b", 1, 550), device("c", 2, 10**9)])
    assert partition(r).boundaries == (1, 6)  # b takes what its memory allows, c the rest, a the one it must


def test_several_sessions_even_out_the_busiest() -> None:
    r = ring([device("a", 2), device("b", 1), device("c", 1)], sessions=3)
    assert partition(r).boundaries == (2, 6)


def test_behind_a_slow_link_balance_is_worth_nothing_and_the_lap_is() -> None:
    two = [device("a", 1), device("b", 2)]
    assert partition(ring(two, sessions=9)).boundaries == (7,)
    assert partition(ring(two, sessions=9, links=links(["a", "b"], bytes_per_s=20_000))).boundaries == (9,)


def test_a_private_head_with_no_room_for_a_block_gets_none() -> None:
    r = ring([device("a", 1, 390), device("b"), device("c")], private=True, sessions=3)
    cut = partition(r)
    assert cut.boundaries[0] == 0
    assert cut.held_by(0)[0].count == 0


times = st.sampled_from([0.5, 1.0, 1.0, 1.5, 2.0, 3.7])
extras = st.sampled_from([0.0, 0.3, 2.0])


@st.composite
def rings(draw: st.DrawFn) -> Ring:
    blocks = draw(st.integers(4, 9))
    stages = draw(st.integers(1, 3))
    private = stages > 1 and draw(st.booleans())
    devices = [
        device(
            f"d{i}",
            draw(times),
            draw(st.sampled_from([500, 700, 900, 1200, 10**6])),
            embed_ms=draw(extras),
            head_ms=draw(extras),
            fixed_ms=draw(extras),
        )
        for i in range(stages)
    ]
    windows = draw(st.one_of(st.just(()), st.tuples(*[st.sampled_from([0, 3, 20])] * blocks)))
    return ring(
        devices,
        blocks,
        model=model(blocks, windows=windows, kv_bytes=draw(st.sampled_from([0, 1, 5]))),
        links=links([d.name for d in devices], bytes_per_s=draw(st.sampled_from([1e9, 4e5]))),
        sessions=draw(st.sampled_from([1, 2, 5])),
        context_tokens=draw(st.sampled_from([0, 10])),
        private=private,
        tail_blocks=draw(st.integers(0, 2)) if private else 0,
    )


@settings(max_examples=400, deadline=None)
@given(rings(), st.data())
def test_no_cut_is_better(r: Ring, data: st.DataObject) -> None:
    count = len(r.devices) - 1
    ends = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda p: (p[0], p[0] + p[1]))
    within = data.draw(st.none() | st.lists(ends, min_size=count, max_size=count))
    possible = [
        cut
        for cut in every_cut(r)
        if fits(r, cut)
        and (within is None or all(a <= b <= z for b, (a, z) in zip(cut.boundaries, within, strict=False)))
    ]
    if not possible:
        with pytest.raises(CutError):
            partition(r, within)
        return
    found = partition(r, within)
    assert fits(r, found)
    assert key(predict(r, found)) == pytest.approx(min(key(predict(r, cut)) for cut in possible), rel=1e-6)


def test_the_generator_makes_both_kinds_and_memory_often_decides() -> None:
    """The property above would be hollow if memory never mattered."""
    tight = ring([device("a", 1, 800), device("b", 1, 800)], 8)
    loose = ring([device("a", 1), device("b", 5)], 8)
    assert [fits(tight, cut) for cut in every_cut(tight)].count(False) > 3
    assert partition(loose).boundaries == (7,)


@pytest.mark.parametrize(
    ("r", "says"),
    [
        (ring([device("a", 1, 399)]), "devices[a].memory_bytes"),
        (ring([device("a"), device("b", 1, 409)], 4), "devices[b].memory_bytes"),
        (ring([device("a", 1, 600), device("b", 1, 10_000)], 200), "(a 3, b 96 blocks)"),
        (ring([device(n) for n in "abcd"], 3), "4 devices for 3 blocks"),
    ],
)
def test_what_cannot_be_is_said(r: Ring, says: str) -> None:
    with pytest.raises(CutError) as failed:
        partition(r)
    assert says in str(failed.value)


def test_bounds_that_leave_no_room_are_told_from_too_little_memory() -> None:
    r = ring([device("a", 1, 800), device("b")])
    assert partition(r, [(4, 9)]).boundaries == (5,)
    with pytest.raises(CutError, match="within these bounds"):
        partition(r, [(6, 9)])


def test_missing_memory_is_counted() -> None:
    mib = 2**20
    m = model(10, block_bytes=10 * mib, embed_bytes=0, head_bytes=0, tied_bytes=0, kv_bytes=mib)
    r = ring([device("a", 1, 45 * mib), device("b", 1, 23 * mib)], model=m, context_tokens=1)
    with pytest.raises(CutError) as failed:
        partition(r)
    assert "4 of 10 blocks find no room (a 4, b 2 blocks)" in str(failed.value)
    assert "44 MiB more memory" in str(failed.value)


def test_a_ring_needs_a_link_per_device() -> None:
    with pytest.raises(CutError, match="1 links for 2 devices"):
        ring([device("a"), device("b")], links=links(["a", "b"])[:1])
    with pytest.raises(CutError, match="one per device"):
        predict(ring([device("a")]), make_cut(10, (5,)))
