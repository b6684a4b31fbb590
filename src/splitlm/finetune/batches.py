"""An owner's rows as microbatches: shuffled anew each round, rows of like length together, padded."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import torch

from splitlm.core.errors import UsageError
from splitlm.finetune.batch import IGNORED, PAD, Example, Microbatch

_POOL = 64
"""Batches whose rows are sorted by length together. More hardly saves padding, and keeps the same rows together."""


def microbatches(
    rows: Sequence[Example], batch_size: int, *, seed: int, round: int, bucket: bool = True
) -> list[Microbatch]:
    """Every row once, in microbatches of ``batch_size`` (one may be smaller); no rows give none.

    Args:
        rows: an owner's examples.
        batch_size: rows per microbatch.
        seed: of the run.
        round: each shuffles anew. The same arguments give the same microbatches on every machine.
        bucket: put rows of like length together, so that little of a batch is padding; which lengths come when stays
            random, so that counts of microbatches measure work.

    Raises:
        UsageError: ``batch_size`` is below 1, or an example has no token.
    """
    if batch_size < 1:
        raise UsageError(f"batch-size is {batch_size}", where="learning.batch-size", expected="1 or more")
    draw = random.Random(hashlib.sha256(f"microbatches {seed} {round}".encode()).digest())
    order = draw.sample(range(len(rows)), len(rows))
    if bucket:
        pool = _POOL * batch_size
        order = [
            row
            for begin in range(0, len(order), pool)
            for row in sorted(order[begin : begin + pool], key=lambda row: len(rows[row].ids))
        ]
    groups = [order[begin : begin + batch_size] for begin in range(0, len(order), batch_size)]
    if bucket:
        draw.shuffle(groups)
    return [collate([rows[row] for row in group], index) for index, group in enumerate(groups)]


def collate(examples: Sequence[Example], index: int) -> Microbatch:
    """Examples padded on the right to the longest, as the microbatch number ``index``.

    Raises:
        UsageError: there is no example, one has no token, or labels are of two kinds or not one per token.
    """
    longest = max((len(example.ids) for example in examples), default=0)
    shape = (len(examples), longest)
    ids, mask = torch.full(shape, PAD), torch.zeros(shape, dtype=torch.uint8)
    per_token = any(isinstance(example.labels, tuple) for example in examples)
    labels = torch.full(shape if per_token else shape[:1], IGNORED)
    for i, example in enumerate(examples):
        length = len(example.ids)
        if isinstance(example.labels, tuple) is not per_token or (
            isinstance(example.labels, tuple) and len(example.labels) != length
        ):
            raise UsageError(
                f"example {i} has {length} tokens and the labels {example.labels!r:.60}",
                where=f"microbatch {index}",
                expected="one class for each example, or one label for each token of all",
            )
        ids[i, :length] = torch.tensor(example.ids, dtype=torch.int64)
        mask[i, :length] = 1
        if isinstance(example.labels, tuple):
            labels[i, :length] = torch.tensor(example.labels, dtype=torch.int64)
        else:
            labels[i] = example.labels
    return Microbatch(
        index=index,
        ids=ids,
        mask=mask,
        labels=labels,
        samples=len(examples),
        weight=sum(example.weight for example in examples),
        padded=ids.numel(),
    )
