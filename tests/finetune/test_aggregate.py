"""Means and sums of members: by hand, in any order of arrival, exact where they must be, and never of nonsense."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitlm.core.errors import ProtocolError, SplitlmError
from splitlm.finetune.aggregate import Averager, Reducer, average, reduce

State = dict[str, Tensor]
A, B = "base_model.model.h.0.attn.lora_A.weight", "base_model.model.h.0.attn.lora_B.weight"


def seeded(seed: int, dtype: torch.dtype = torch.float32) -> State:
    g = torch.Generator().manual_seed(seed)
    return {key: torch.randn(shape, generator=g).to(dtype) for key, shape in (("w", (3, 4)), ("b", (5,)), ("s", ()))}


def adapter(seed: int, rank: int = 3, inputs: int = 7, outputs: int = 9) -> State:
    g = torch.Generator().manual_seed(seed)
    return {A: torch.randn(rank, inputs, generator=g), B: torch.randn(outputs, rank, generator=g), "c": torch.ones(2)}


def same(one: State | None, other: State | None) -> bool:
    assert one is not None and other is not None and list(one) == list(other)
    return all(torch.equal(one[key], other[key]) and one[key].dtype == other[key].dtype for key in one)


def test_members_weigh_as_many_samples_as_they_had() -> None:
    mean = average([(1, {"w": torch.tensor([0.0, 4.0])}), (3, {"w": torch.tensor([4.0, 8.0])})])
    assert mean is not None and mean["w"].tolist() == [3.0, 7.0]


def test_the_mean_is_the_weighted_one() -> None:
    members = [(n, seeded(n)) for n in (5, 1, 30, 7)]
    mean = average(members)
    assert mean is not None
    for key in mean:
        right = sum(n / 43 * state[key].double() for n, state in members)
        torch.testing.assert_close(mean[key].double(), right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_one_member_or_equal_ones_are_returned_to_the_bit(dtype: torch.dtype) -> None:
    state = seeded(1, dtype)
    assert same(average([(7, state)]), state)
    assert same(average([(7, state), (3, state), (11, state)]), state)


def test_half_precision_is_accumulated_in_float32() -> None:
    """4097 equal steps: in bfloat16 or float16 the mean would stop moving long before."""
    for dtype in (torch.float16, torch.bfloat16):
        members = [(1, {"w": torch.zeros(1, dtype=dtype)})] * 2048 + [(1, {"w": torch.ones(1, dtype=dtype)})] * 2048
        mean = average(members)
        assert mean is not None and mean["w"].dtype == dtype and mean["w"].item() == 0.5
        total = reduce([{"w": torch.full((1,), 0.001, dtype=dtype)}] * 1000)
        assert total is not None and total["w"].item() == pytest.approx(1.0, rel=1e-2)


def test_float64_stays_float64() -> None:
    mean = average([(1, {"w": torch.tensor([1.0], dtype=torch.float64)}), (2, {"w": torch.tensor([2.0]).double()})])
    assert mean is not None and mean["w"].item() == pytest.approx(5 / 3, rel=1e-15)


def test_a_member_without_samples_is_left_out() -> None:
    """Whatever it holds: it trained nothing."""
    state = seeded(1)
    assert same(average([(0, {}), (4, state), (0, {"w": torch.tensor(math.nan)})]), state)
    assert average([(0, seeded(1)), (0, seeded(2))]) is None
    assert average([]) is None


def test_the_mean_lies_in_memory_of_its_own() -> None:
    state = {"w": torch.ones(2)}
    mean = average([(1, state)])
    total = reduce([state])
    state["w"].zero_()
    assert mean is not None and mean["w"].tolist() == [1.0, 1.0]
    assert total is not None and total["w"].tolist() == [1.0, 1.0]


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(4)), st.sampled_from(["factors", "dense"]))
def test_the_order_of_arrival_changes_no_bit(order: list[int], lora: str) -> None:
    states = [seeded(i) | adapter(i) for i in range(4)]
    averager, reducer = Averager(4, lora=lora), Reducer(4)  # type: ignore[arg-type]
    for i in order:
        averager.add(i, 3 * i, states[i])
        reducer.add(i, states[i])
    assert same(averager.result(), average([(3 * i, s) for i, s in enumerate(states)], lora=lora))  # type: ignore[arg-type]
    assert same(reducer.result(), reduce(states))


def test_members_are_let_go_once_they_are_added() -> None:
    class Watched(dict[str, Tensor]):
        alive = 0

        def __init__(self) -> None:
            super().__init__(w=torch.ones(1))
            Watched.alive += 1

        def __del__(self) -> None:
            Watched.alive -= 1

    averager = Averager(4)
    for i, alive in ((1, 1), (2, 2), (0, 0), (3, 0)):
        averager.add(i, 1, Watched())
        assert Watched.alive == alive


def test_a_member_comes_once_and_nobody_is_missing() -> None:
    averager = Averager(2, names=("north", "south"))
    averager.add(1, 1, seeded(1))
    with pytest.raises(RuntimeError, match="north has not"):
        averager.result()
    averager.add(0, 1, seeded(1))
    for again in (0, 1, 2, -1):
        with pytest.raises(RuntimeError, match="added before"):
            averager.add(again, 1, seeded(1))
    with pytest.raises(RuntimeError, match="names"):
        Averager(3, names=("north",))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"w": torch.ones(3)}, r"'w' is float32 \[3\]. Expected float32 \[2\], as north"),
        ({"w": torch.ones(2).double()}, "'w' is float64"),
        ({}, "'w' is absent"),
        ({"w": torch.ones(2), "x": torch.ones(2)}, "'x' is float32 .* absent, as north"),
    ],
)
def test_members_must_agree(other: State, says: str) -> None:
    ours = {"w": torch.ones(2)}
    with pytest.raises(ProtocolError, match=f"south: The tensor {says}"):
        average([(1, ours), (1, other)], names=("north", "south"))
    if other:
        with pytest.raises(ProtocolError, match=f"south: The tensor {says}"):
            reduce([ours, other], names=("north", "south"))


def test_a_count_is_not_negative() -> None:
    with pytest.raises(ProtocolError, match="member 1: -1 samples"):
        average([(3, seeded(1)), (-1, seeded(2))])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 1])
def test_what_is_not_finite_is_an_error_and_never_zero(bad: float, position: int) -> None:
    states = [{"w": torch.ones(4), "x": torch.ones(4)} for _ in range(2)]
    states[position]["x"][2] = bad
    for work in (lambda: average([(1, s) for s in states]), lambda: reduce(states)):
        with pytest.raises(SplitlmError, match=f"member {position}: The tensor 'x' .* not finite"):
            work()


def test_integers_have_no_mean() -> None:
    assert same(average([(1, {"i": torch.arange(3)}), (2, {"i": torch.arange(3)})]), {"i": torch.arange(3)})
    with pytest.raises(ProtocolError, match="'i'"):
        average([(1, {"i": torch.arange(3)}), (2, {"i": torch.zeros(3, dtype=torch.int64)})])


def test_a_sum_is_plain_and_in_order() -> None:
    big, one = torch.tensor([2.0**25]), torch.tensor([1.0])
    assert reduce([{"w": big}, {"w": one}, {"w": -big}]) == {"w": torch.tensor([0.0])}
    assert reduce([{"w": big}, {"w": -big}, {"w": one}]) == {"w": torch.tensor([1.0])}
    assert reduce([{}, {"w": one}, {}, {"w": one}]) == {"w": torch.tensor([2.0])}
    assert reduce([{}, {}]) is None


def test_the_mean_of_factors_is_not_that_of_products() -> None:
    """Why there are two ways: each is the mean of what it says, and of nothing else."""
    members = [(n, adapter(n)) for n in (1, 2, 3)]
    product = sum(n / 6 * (s[B].double() @ s[A].double()) for n, s in members)
    factors, dense = average(members), average(members, lora="dense")
    assert factors is not None and dense is not None
    for key in (A, B):
        torch.testing.assert_close(factors[key], sum(n / 6 * s[key] for n, s in members), rtol=1e-5, atol=1e-6)
    u, s, vh = torch.linalg.svd(product)
    best = (u[:, :3] * s[:3]) @ vh[:3]
    torch.testing.assert_close(dense[B].double() @ dense[A].double(), best, rtol=1e-5, atol=1e-5)
    assert (factors[B] @ factors[A] - product).norm() > 1.05 * (best - product).norm()
    assert list(dense) == [A, B, "c"] and torch.equal(dense["c"], torch.ones(2))


@pytest.mark.parametrize(("rank", "inputs", "outputs"), [(3, 7, 9), (8, 64, 48), (4, 2, 9), (4, 9, 3), (1, 1, 1)])
def test_dense_of_one_member_keeps_its_product(rank: int, inputs: int, outputs: int) -> None:
    state = adapter(5, rank, inputs, outputs)
    dense = average([(9, state)], lora="dense")
    assert dense is not None and dense[A].shape == state[A].shape and dense[B].shape == state[B].shape
    product = state[B] @ state[A]
    assert (dense[B] @ dense[A] - product).norm() <= 1e-6 * product.norm()


def test_dense_leaves_no_direction_dead() -> None:
    """At the start B is 0. A must not become 0 with it, or neither would ever have a gradient again."""
    states = [adapter(i) | {B: torch.zeros(9, 3)} for i in range(2)]
    dense = average([(1, s) for s in states], lora="dense")
    assert dense is not None and torch.equal(dense[B], torch.zeros(9, 3))
    assert dense[A].norm() == pytest.approx(math.sqrt(sum(float(s[A].norm()) ** 2 for s in states) / 2), rel=1e-5)
    assert torch.linalg.matrix_rank(dense[A]) == 3


@pytest.mark.parametrize("a", ["lora_A.default.weight", "x.lora_embedding_A", "lora_A"])
def test_factors_are_known_by_their_names(a: str) -> None:
    b = a.replace("_A", "_B")
    members: list[tuple[int, State]] = [(1, {a: s[A], b: s[B]}) for s in (adapter(1), adapter(2))]
    dense, plain = average(members, lora="dense"), average(members)
    assert dense is not None and plain is not None and not torch.allclose(dense[a], plain[a])
    lookalike: list[tuple[int, State]] = [(n, {"my_lora_Ab": s[A]}) for n, s in members_of(a, members)]
    assert same(average(lookalike, lora="dense"), average(lookalike))


def members_of(a: str, members: list[tuple[int, State]]) -> list[tuple[int, State]]:
    return [(n, {A: state[a]}) for n, state in members]


@pytest.mark.parametrize("broken", [{A: torch.ones(3, 7)}, {A: torch.ones(3, 7), B: torch.ones(9, 2)}])
def test_factors_that_do_not_fit_are_refused(broken: State) -> None:
    with pytest.raises(ProtocolError, match=r"member 0: .*lora_A.*rank"):
        average([(1, broken)], lora="dense")


def test_every_order_of_three_is_the_same_sum() -> None:
    states = [{"w": torch.tensor([x])} for x in (2.0**25, 1.0, -(2.0**25))]
    for order in itertools.permutations(range(3)):
        reducer = Reducer(3)
        for i in order:
            reducer.add(i, states[i])
        assert reducer.result() == {"w": torch.tensor([0.0])}
