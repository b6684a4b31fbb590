"""The verdict on two runs, with literals."""

from __future__ import annotations

import math

import pytest
import torch

from splitlm.check.compare import BOUND, Comparison, Run, compare, rule
from splitlm.core.errors import CheckFailedError


def run(*rows: list[float], tokens: list[int] | None = None) -> Run:
    logits = [torch.tensor(row) for row in rows]
    return Run(tokens if tokens is not None else [int(x.argmax()) for x in logits], logits)


A, B = [3.0, 1.0, 0.0], [0.0, 2.5, 2.0]


def test_the_same_bits_are_bit_equal() -> None:
    result = compare(run(A, B), run(A, B))
    assert result.ok and result.bit_equal and result.failure == ""
    assert (result.matches, result.delta, result.margin) == (2, 0.0, 0.5)


def test_a_difference_below_the_bound_is_allowed_and_not_called_bit_equal() -> None:
    near = [3.0, 1.0, BOUND / 2]
    result = compare(run(near, B), run(A, B))
    assert result.ok and not result.bit_equal
    assert result.delta == pytest.approx(BOUND / 2)


def test_signed_zeros_are_not_the_same_bits() -> None:
    result = compare(run([1.0, -0.0]), run([1.0, 0.0]))
    assert result.ok and result.delta == 0.0 and not result.bit_equal


def test_logits_beyond_the_bound_fail_though_every_id_agrees() -> None:
    far = [3.0, 1.0, BOUND * 1.01]
    result = compare(run(B, far), run(B, A))
    assert result.matches == 2 and not result.ok
    assert "at index 1 the ids agree, and max |Δlogit| is 0.0005" in result.failure and "KV" in result.failure


@pytest.mark.parametrize(("index", "says"), [(0, "rotary positions across a boundary"), (1, "a stage's KV")])
def test_a_failure_says_where_to_look(index: int, says: str) -> None:
    ours, theirs = [B, B, B], [B, B, B]
    ours[index] = [9.0, 1.0, 0.0]
    result = compare(run(*ours), run(*theirs))
    assert result.first_bad is not None and result.first_bad.index == index
    assert f"at index {index} the ring chose 0 and the reference 1" in result.failure and says in result.failure
    assert "top-2 margin of 0.5" in result.failure


@pytest.mark.parametrize(
    ("margin", "delta", "excused"), [(3e-4, 2e-4, True), (4.5e-4, 2e-4, False), (3e-4, 1.4e-4, False)]
)
def test_a_differing_id_is_excused_only_within_the_margin_rule(margin: float, delta: float, excused: bool) -> None:
    """2·|Δ| is the farthest that two logits can move against each other."""
    theirs = torch.tensor([0.0, margin, -1.0], dtype=torch.float64).float()
    ours = torch.tensor([delta, margin - delta, -1.0], dtype=torch.float64).float()
    result = compare(Run([0], [ours]), Run([1], [theirs]))
    assert result.ok is excused
    assert len(result.excused) == excused
    assert not result.bit_equal and result.matches == 0


def test_an_excused_difference_does_not_hide_a_later_failure() -> None:
    tie, moved = [0.0, 1e-4, -1.0], [1e-4, 0.0, -1.0]
    result = compare(run(moved, B, [0.0, 2.0, 2.5]), run(tie, B, B))
    assert [step.index for step in result.excused] == [0]
    assert result.first_bad is not None and result.first_bad.index == 2 and not result.ok


def test_an_excuse_needs_logits_within_the_bound() -> None:
    result = compare(run([0.1, 0.0]), run([0.0, 0.1]))
    assert not result.excused and not result.ok


@pytest.mark.parametrize(("dtype", "step"), [("bfloat16", 2.0**-7), ("float16", 2.0**-10)])
def test_half_precision_is_bounded_by_its_own_rounding(dtype: str, step: float) -> None:
    limit = 16 * step * 8
    theirs = run([8.0, 8.0 - limit, 0.0])
    near, far = [8.0 - limit, 8.0, 0.0], [8.0 - 2 * limit, 8.0, 0.0]
    assert compare(run(near), theirs, dtype).ok and compare(run(near), theirs, dtype).excused
    assert compare(run(near), theirs, dtype).delta == limit
    assert not compare(run(far), theirs, dtype).ok, "far enough apart, any tie looks close"
    assert not compare(run([8.0, 0.0, 2 * limit]), run([8.0, 0.0, 0.0]), dtype).ok, "with the same id too"
    assert not compare(run(near), theirs).ok
    assert dtype in rule(dtype) and "0.0005" in rule("float32")


def test_a_narrow_type_is_widened_without_change() -> None:
    wide = torch.tensor([1.0, 0.5, -3.0])
    assert compare(Run([0], [wide]), Run([0], [wide.bfloat16()]), "bfloat16").bit_equal


def test_the_same_logits_and_another_id_is_a_matter_of_sampling() -> None:
    result = compare(run(A, tokens=[2]), run(A))
    assert not result.ok and "sampling" in result.failure


def test_equal_infinities_are_equal_and_nan_never_is() -> None:
    assert compare(run([1.0, -math.inf]), run([1.0, -math.inf])).bit_equal
    for dtype in ("float32", "bfloat16"):
        bad = compare(run([1.0, math.nan], tokens=[0]), run([1.0, math.nan], tokens=[0]), dtype)
        assert not bad.ok and not bad.bit_equal and "not finite" in bad.failure
        assert not compare(run([1.0, -math.inf]), run([1.0, 0.0]), dtype).ok


def test_lengths_must_agree_and_nothing_compared_is_no_success() -> None:
    short = compare(run(A), run(A, B))
    assert not short.ok and not short.bit_equal and short.failure == "the ring made 1 tokens and the reference 2"
    assert not Comparison((), (0, 0)).ok and Comparison((), (0, 0)).failure
    assert not Comparison((), (0, 0)).bit_equal


def test_missing_logits_and_other_vocabularies_are_refused() -> None:
    with pytest.raises(CheckFailedError, match="logits of every token"):
        compare(Run([0, 1], [torch.tensor(A)]), run(A))
    with pytest.raises(CheckFailedError, match="shape"):
        compare(run([1.0, 0.0]), run(A))
