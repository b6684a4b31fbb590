"""Microbatches: what is in them, and in which order."""

from __future__ import annotations

import random

import pytest
import torch

from splitlm.core.errors import UsageError
from splitlm.finetune.batch import Example, Microbatch
from splitlm.finetune.batches import collate, microbatches


def made(lengths: list[int]) -> list[Example]:
    """Examples that can be told apart by their first id."""
    return [Example((i + 1, *[7] * (n - 1)), i % 3, 1) for i, n in enumerate(lengths)]


LENGTHS = random.Random(5).choices(range(1, 61), k=101)
ROWS = made(LENGTHS)


def numbers(batches: list[Microbatch]) -> list[list[int]]:
    return [(batch.ids[:, 0] - 1).tolist() for batch in batches]


@pytest.mark.parametrize("bucket", [False, True])
@pytest.mark.parametrize("size", [1, 4, 200])
def test_every_row_is_in_one_batch(size: int, bucket: bool) -> None:
    batches = microbatches(ROWS, size, seed=1, round=1, bucket=bucket)
    assert sorted(row for group in numbers(batches) for row in group) == list(range(101))
    assert [batch.index for batch in batches] == list(range(-(-101 // size)))
    assert sorted(batch.samples for batch in batches) == [101 % size] * (101 % size > 0) + [size] * (101 // size)
    for batch, group in zip(batches, numbers(batches), strict=True):
        assert batch.ids.shape == batch.mask.shape == (len(group), max(LENGTHS[row] for row in group))
        assert batch.mask.sum(dim=1).tolist() == [LENGTHS[row] for row in group]
        assert batch.labels.tolist() == [row % 3 for row in group]
        assert (batch.samples, batch.weight, batch.padded) == (len(group), len(group), batch.ids.numel())


def test_the_same_arguments_give_the_same_batches_whatever_else_is_drawn() -> None:
    first = microbatches(ROWS, 4, seed=1, round=2)
    torch.manual_seed(99)
    random.seed(99)
    again = microbatches(ROWS, 4, seed=1, round=2)
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(first, again, strict=True))
    assert random.random() == random.Random(99).random(), "the global generator was used"


def test_the_order_is_the_same_on_every_machine() -> None:
    """Known answers: whoever changes the draw changes every published run."""
    rows = made([3, 1, 2, 3, 1, 2, 3])
    assert numbers(microbatches(rows, 2, seed=1, round=0)) == [[2, 5], [0], [1, 4], [3, 6]]
    assert numbers(microbatches(rows, 2, seed=1, round=0, bucket=False)) == [[3, 2], [1, 6], [0, 5], [4]]


def test_seed_and_round_shuffle_apart() -> None:
    orders = [str(numbers(microbatches(ROWS, 4, seed=seed, round=number))) for seed in (1, 2) for number in (1, 2)]
    assert len(set(orders)) == 4


def test_buckets_save_padding() -> None:
    def padded(bucket: bool) -> int:
        return sum(batch.padded for batch in microbatches(ROWS, 4, seed=1, round=0, bucket=bucket))

    assert sum(LENGTHS) <= padded(True) < 1.1 * sum(LENGTHS)
    assert padded(False) > 1.3 * sum(LENGTHS)


def test_lengths_come_in_any_order() -> None:
    lengths = [batch.ids.shape[1] for batch in microbatches(ROWS, 4, seed=1, round=0)]
    assert lengths != sorted(lengths) and lengths != sorted(lengths, reverse=True)
    half = len(lengths) // 2
    assert abs(sum(lengths[:half]) / half - sum(lengths[half:]) / (len(lengths) - half)) < 15


def test_rows_of_like_length_meet_others_in_other_rounds() -> None:
    rows = made([5] * 40)
    pairs = [{frozenset(group) for group in numbers(microbatches(rows, 2, seed=1, round=n))} for n in (0, 1)]
    assert len(pairs[0] & pairs[1]) < 5


def test_rows_of_a_large_set_meet_others_even_if_no_two_are_of_one_length() -> None:
    rows = made(list(range(1, 601)))
    pairs = [{frozenset(group) for group in numbers(microbatches(rows, 2, seed=1, round=n))} for n in (0, 1)]
    assert len(pairs[0] & pairs[1]) < 150


def test_no_rows_give_no_batch() -> None:
    assert microbatches([], 4, seed=1, round=0) == []


def test_token_labels_are_padded_with_what_the_loss_ignores() -> None:
    batch = collate([Example((5, 6, 2), (-100, 6, 2), 2), Example((2,), (2,), 7)], 3)
    assert batch.ids.tolist() == [[5, 6, 2], [2, 0, 0]]
    assert batch.mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.labels.tolist() == [[-100, 6, 2], [2, -100, -100]]
    assert (batch.index, batch.samples, batch.weight, batch.padded) == (3, 2, 9, 6)
    assert (batch.ids.dtype, batch.mask.dtype, batch.labels.dtype) == (torch.int64, torch.uint8, torch.int64)


def test_a_batch_size_below_one() -> None:
    with pytest.raises(UsageError, match="batch-size is 0"):
        microbatches(ROWS, 0, seed=1, round=0)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(UsageError, match=r"microbatch 4.*has no token"):
        collate([], 4)


def test_an_example_without_a_token_is_refused() -> None:
    with pytest.raises(UsageError, match=r"sample \d is padding only"):
        microbatches([Example((3,), 0, 1), Example((), 0, 1)], 2, seed=1, round=1, bucket=True)
    with pytest.raises(UsageError, match="has no token"):
        collate([Example((), 0, 1)], 0)


@pytest.mark.parametrize(
    "examples",
    [
        [Example((1, 2), 0, 1), Example((1, 2), (1, 2), 1)],
        [Example((1, 2), (1, 2, 3), 1)],
    ],
)
def test_labels_of_two_kinds_are_refused(examples: list[Example]) -> None:
    with pytest.raises(UsageError, match="one label for each token"):
        collate(examples, 0)


IDS = torch.ones(2, 3, dtype=torch.int64)
BYTES = torch.ones(2, 3, dtype=torch.uint8)
LABELS = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("ids", "mask", "labels", "samples", "says"),
    [
        (IDS[:0], BYTES[:0], LABELS[:0], 0, "has no token"),
        (IDS[:, :0], BYTES[:, :0], LABELS, 2, "has no token"),
        (IDS[0], BYTES[0], LABELS, 2, "has no token"),
        (IDS, BYTES[:1], LABELS, 2, "a mask of the ids' shape"),
        (IDS, BYTES, LABELS[:1], 2, "one label per sample or per token"),
        (IDS, BYTES.bool(), LABELS, 2, "int64, uint8 and int64"),
        (IDS.int(), BYTES, LABELS, 2, "int64, uint8 and int64"),
        (IDS, BYTES * torch.tensor([[1], [0]], dtype=torch.uint8), LABELS, 2, "sample 1 is padding only"),
        (IDS, BYTES, LABELS, 3, "samples 3"),
    ],
)
def test_what_is_no_batch(ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor, samples: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Microbatch(0, ids, mask, labels, samples, 2, ids.numel())
