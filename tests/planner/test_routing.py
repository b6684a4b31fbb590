"""Turns, credits and speeds: the published orders, and what holds for all weights and histories."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitlm.core.errors import ProtocolError, UsageError
from splitlm.planner.routing import Credits, SmoothWRR, Speeds, credit

WEIGHTS = st.lists(st.integers(1, 12), min_size=1, max_size=5).map(lambda ws: dict(enumerate(ws)))


def turns(wrr: SmoothWRR[str], count: int, eligible: str = "abc") -> str:
    able = [worker for worker in wrr.weights if worker in eligible]
    return "".join(wrr.choose(able) or "-" for _ in range(count))


def test_the_published_orders() -> None:
    assert turns(SmoothWRR({"a": 3, "b": 1}), 12) == "aaba" * 3
    assert turns(SmoothWRR({"a": 5, "b": 1, "c": 1}), 14) == "aabacaa" * 2
    assert turns(SmoothWRR({"a": 1, "b": 1, "c": 1}), 6) == "abcabc"


def test_the_order_goes_on_where_it_was() -> None:
    wrr = SmoothWRR({"a": 3, "b": 1})
    assert turns(wrr, 3) + turns(wrr, 3) + turns(wrr, 2) == "aabaaaba"


def test_a_full_worker_is_passed_over_and_gets_no_burst_later() -> None:
    wrr = SmoothWRR({"a": 3, "b": 1})
    assert turns(wrr, 50, eligible="a") == "a" * 50
    assert turns(wrr, 8) == "aabaaaba"
    assert wrr.choose([]) is None
    with pytest.raises(RuntimeError, match="'z'"):
        wrr.choose(["z"])


def test_new_weights_keep_the_place_in_the_order_whatever_their_unit() -> None:
    wrr = SmoothWRR({"a": 3, "b": 1})
    assert turns(wrr, 2) == "aa"
    wrr.reweigh({"a": 30000, "b": 10000})
    assert turns(wrr, 6) == "baaaba"
    wrr.reweigh({"b": 1, "c": 1})
    assert wrr.weights == {"b": 1, "c": 1}
    assert Counter(turns(wrr, 10)) == {"b": 5, "c": 5}


@given(WEIGHTS, st.integers(1, 3))
def test_a_cycle_gives_everyone_its_weight(weights: dict[int, int], cycles: int) -> None:
    """Exactly, in every cycle; and within one nobody is more than one turn ahead of its share."""
    wrr, total, count = SmoothWRR(weights), sum(weights.values()), Counter[int]()
    for n in range(1, cycles * total + 1):
        chosen = wrr.choose(weights)
        assert chosen is not None
        count[chosen] += 1
        assert all(count[w] - n * weight / total < 1 for w, weight in weights.items())
        if n % total == 0:
            assert count == {w: n // total * weight for w, weight in weights.items()}


@given(WEIGHTS, st.data())
def test_nobody_who_is_always_able_starves(weights: dict[int, int], data: st.DataObject) -> None:
    """Worker 0 can always take work, the others as it happens; its share of what it could have had is kept."""
    wrr, others = SmoothWRR(weights), [w for w in weights if w]
    share, count = 0.0, 0
    for able in data.draw(st.lists(st.sets(st.sampled_from(others)) if others else st.just(set()), max_size=60)):
        share += weights[0] / (weights[0] + sum(weights[w] for w in able))
        chosen = wrr.choose({0, *able})
        assert chosen in {0, *able}
        count += chosen == 0
    spread = len(weights) * max(1.0, sum(weights.values()) / weights[0])
    assert count >= share - spread


@pytest.mark.parametrize("bad", [{}, {"a": 0.0}, {"a": 1.0, "b": -1.0}, {"a": math.nan}, {"a": math.inf}])
def test_weights_are_positive_numbers(bad: dict[str, float]) -> None:
    for make in (SmoothWRR, Speeds, SmoothWRR({"a": 1}).reweigh):
        with pytest.raises(UsageError):
            make(bad)


@pytest.mark.parametrize(
    ("max_inflight", "worker_max", "owners", "given_"), [(2, 8, 1, 2), (4, 8, 3, 2), (9, 8, 1, 8), (2, 3, 3, 1)]
)
def test_an_owners_credit(max_inflight: int, worker_max: int, owners: int, given_: int) -> None:
    assert credit(max_inflight, worker_max, owners) == given_


@pytest.mark.parametrize(("settings_", "key"), [((2, 3, 4), "worker-max-inflight"), ((0, 8, 1), "max-inflight")])
def test_settings_that_starve_an_owner_are_refused(settings_: tuple[int, int, int], key: str) -> None:
    with pytest.raises(UsageError, match=rf"u-shape\.{key}:"):
        credit(*settings_)


def test_credits_are_taken_and_given_back() -> None:
    credits = Credits({"a": 2, "b": 1})
    credits.take("b")
    assert (credits.live("b"), credits.left("b"), credits.eligible()) == (1, 0, ["a"])
    with pytest.raises(RuntimeError, match="1 of 1 credits"):
        credits.take("b")
    credits.give_back("b")
    assert credits.eligible() == ["a", "b"]
    for wrong in (credits.give_back, credits.take):
        with pytest.raises(RuntimeError):
            wrong("b" if wrong == credits.give_back else "z")
    assert credits.live("b") == 0
    with pytest.raises(RuntimeError, match="never"):
        Credits({"a": 0})


def test_a_lost_worker_and_a_dropped_window() -> None:
    credits = Credits({"a": 2, "b": 2})
    for worker in "aab":
        credits.take(worker)
    assert credits.drop("a") == 2 and credits.drop("z") == 0
    assert credits.eligible() == ["b"]
    credits.clear()
    assert (credits.left("b"), credits.eligible()) == (2, ["b"])


@settings(max_examples=60)
@given(WEIGHTS, st.integers(1, 4), st.lists(st.integers(0, 5), max_size=80))
def test_live_never_exceeds_credit(weights: dict[int, int], most: int, moves: list[int]) -> None:
    """Owner's loop: send wherever there is credit, or take back from one; work goes out while any credit is left."""
    wrr, credits = SmoothWRR(weights), Credits(dict.fromkeys(weights, most))
    out: list[int] = []
    for move in moves:
        if move < 4:
            chosen = wrr.choose(credits.eligible())
            assert (chosen is None) == (len(out) == most * len(weights))
            if chosen is not None:
                credits.take(chosen)
                out.append(chosen)
        elif out:
            credits.give_back(out.pop(move % len(out)))
        for worker in weights:
            assert credits.live(worker) == out.count(worker) <= most
            assert credits.left(worker) == most - out.count(worker)


def test_speeds_count_once_everyone_has_one() -> None:
    speeds = Speeds({"a": 3, "b": 1})
    speeds.report("a", 100)
    speeds.report("a", 200)
    assert speeds.weights() == {"a": 3, "b": 1}
    speeds.report("b", 60)
    assert speeds.weights() == pytest.approx({"a": 120, "b": 60})
    speeds.report("b", 10)
    assert speeds.weights() == pytest.approx({"a": 120, "b": 50})
    speeds.new_round()
    assert speeds.weights() == {"a": 3, "b": 1}
    speeds.report("a", 7)
    speeds.report("b", 7)
    assert speeds.weights() == pytest.approx({"a": 7, "b": 7})  # nothing of the last round is left in it


def test_a_slow_worker_keeps_a_twentieth() -> None:
    speeds = Speeds({"a": 1, "b": 1})
    speeds.report("a", 1000)
    speeds.report("b", 1)
    assert speeds.weights() == pytest.approx({"a": 1000, "b": 50})


def test_a_lost_worker_is_not_waited_for() -> None:
    speeds = Speeds({"a": 3, "b": 1})
    speeds.report("a", 10)
    speeds.drop("b")
    assert speeds.weights() == {"a": 10}
    with pytest.raises(RuntimeError, match="last"):
        speeds.drop("a")


@pytest.mark.parametrize(("worker", "speed"), [("a", 0.0), ("a", math.nan), ("a", math.inf), ("z", 1.0)])
def test_what_a_worker_reports_is_checked(worker: str, speed: float) -> None:
    speeds = Speeds({"a": 3})
    with pytest.raises(ProtocolError, match=f"worker {worker}"):
        speeds.report(worker, speed)
    assert speeds.weights() == {"a": 3}
