"""How near an engine's logits are to a reference's, and how well both foretell a text. Pure: no model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import torch


@dataclass(frozen=True)
class Likeness:
    """What came of one engine.

    Attributes:
        name: as people read it.
        perplexity: of the text; infinite where it overflows.
        top1: share of the tokens for which its most probable token is the reference's.
        largest: |Δlogit| of the token that differs most; a token's is the largest over the vocabulary.
        median: |Δlogit| of the token in the middle.
        engine: that computed, by the name it gives itself.
        left: matrices that stay in float32 since the engine cannot pack them, each with the reason.
    """

    name: str
    perplexity: float
    top1: float
    largest: float
    median: float
    engine: str = "exact"
    left: tuple[str, ...] = ()


def likeness(
    name: str,
    rows: Iterable[torch.Tensor],
    text: Sequence[int],
    reference: Sequence[torch.Tensor],
    *,
    engine: str = "exact",
    left: Sequence[str] = (),
) -> Likeness:
    """Compare logits ``[vocab]``, one row for each token of ``text``, with the reference's of the same tokens.

    Args:
        rows: from which the tokens of ``text`` were to be foretold; taken one by one.
        engine, left: see ``Likeness``.
    """
    costs, deltas, same = [], [], 0
    for logits, token, true in zip(rows, text, reference, strict=True):
        logits = logits.float()
        costs.append(-float(logits.double().log_softmax(-1)[token]))
        deltas.append(float((logits - true).abs().max()))
        same += int(logits.argmax() == true.argmax())
    mean = fmean(costs)
    return Likeness(
        name,
        math.exp(mean) if mean < math.log(torch.finfo(torch.float64).max) else math.inf,
        same / len(costs),
        max(deltas),
        median(deltas),
        engine,
        tuple(left),
    )


@dataclass(frozen=True)
class Passage:
    """A part of a text: tokens that are given, and tokens that are to be foretold one by one."""

    given: tuple[int, ...]
    scored: tuple[int, ...]


def passages(ids: Sequence[int], tokens: int, context: int, *, begin: Sequence[int] = ()) -> list[Passage]:
    """Passages spread evenly over a text, in which ``tokens`` are scored, or as many as there are.

    Half of a passage is given and half is scored, ``2 · HALF`` tokens in all where text and context have them.

    Args:
        ids: of the text.
        context: how long a passage may be.
        begin: tokens with which every passage begins.
    """
    length = min(2 * HALF, context - len(begin), len(ids))
    given = min(length // 2, length - 1)
    if given + len(begin) < 1:
        return []
    each = length - given
    count = max(1, min(math.ceil(tokens / each), len(ids) // length))
    found = []
    for i in range(count):
        at = i * (len(ids) - length) // max(1, count - 1)
        scored = ids[at + given : at + given + min(each, tokens - i * each)]
        found.append(Passage((*begin, *ids[at : at + given]), tuple(scored)))
    return found


HALF = 64
"""Tokens of a passage that are given, and as many that are scored."""
