"""Text to training examples, and the way of the data: ``load_rows``, ``encode``, ``distribute``, ``microbatches``."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from splitlm.core.errors import PromptError, UsageError
from splitlm.finetune.batch import IGNORED, Example
from splitlm.finetune.batches import microbatches
from splitlm.finetune.dataset import Rows, load_rows
from splitlm.finetune.objective import Objective
from splitlm.finetune.split import distribute
from splitlm.model.text import TextCodec

__all__ = ["Encoded", "Rows", "distribute", "encode", "load_rows", "microbatches", "prompt_of"]

_log = logging.getLogger(__name__)

_LONGEST_SAMPLE = 128
"""Tokens of a text that is classified, at most; a sentence has 20."""
_LONGEST_TEXT = 512
"""Tokens of a text to be learnt, at most. Memory grows with it; a GSM8K row has 150 to 300."""


@dataclass(frozen=True)
class Encoded:
    """The examples of a data set.

    Attributes:
        examples: those that have an item for the loss, in the rows' order.
        rows: the row number of each.
    """

    examples: tuple[Example, ...]
    rows: tuple[int, ...]

    def of(self, share: Sequence[int]) -> list[Example]:
        """The examples of these row numbers, in their order; rows without an example are passed over."""
        by_row = dict(zip(self.rows, self.examples, strict=True))
        return [by_row[row] for row in share if row in by_row]


def prompt_of(question: str) -> str:
    """A question as it is put to the model, in training and in evaluation alike; the answer follows at once."""
    return f"{question}\n"


def encode(
    rows: Rows,
    codec: TextCodec,
    objective: Objective,
    *,
    context: int,
    max_length: int | None = None,
    num_labels: int | None = None,
    vocab: int | None = None,
    only: Iterable[int] | None = None,
) -> Encoded:
    """The rows as token ids and labels.

    Classification: the text, cut to length *inside* the special tokens that end it. Token loss: the text and EOS, every
    token a label; of a question and its answer only the answer and EOS are labels, since the question is given when the
    model is used. A text that is too long loses its end, EOS with it. Rows that are left without an item for the loss
    (one token, or a question that fills the length) are left out, and the log says how many.

    Args:
        rows: what ``load_rows`` returns.
        codec: the model's tokenizer.
        objective: what is learnt.
        context: positions that the model has.
        max_length: tokens per row at most; the default is 128 for classification and 512 for token losses. Never more
            than ``context``.
        num_labels: classes that the model has, where that is known already.
        vocab: tokens that the model has, where that is known.
        only: numbers of the rows that are wanted, such as one owner's; all, if none are named.

    Raises:
        UsageError: the objective needs labels and the rows have none, a label is beyond ``num_labels``, a token beyond
            ``vocab``, a length is below 2, or a row's text cannot be tokenised.
    """
    length = min(context, max_length or (_LONGEST_TEXT if objective.token_loss else _LONGEST_SAMPLE))
    if length < 2 or (max_length is not None and max_length < 2):
        raise UsageError(f"rows cannot be cut to {max_length or length} tokens", where="data", expected="2 or more")
    if not objective.token_loss:
        _check_labels(rows, objective, num_labels)
    found: list[tuple[int, Example]] = []
    ending = _ending(codec)
    wanted = range(len(rows)) if only is None else sorted(set(only))
    for row in wanted:
        try:
            example = (
                _tokens(rows, row, codec, objective, length)
                if objective.token_loss
                else _sample(rows, row, codec, length, ending)
            )
        except PromptError as error:
            raise UsageError(
                f"this text cannot be tokenised: {error.what}",
                where=f"{rows.source}, row {row}",
                expected=error.expected,
            ) from error
        if vocab is not None and (highest := max(example.ids, default=0)) >= vocab:
            raise UsageError(
                f"the tokenizer gives token id {highest}, and the model has {vocab} tokens",
                where=f"{rows.source}, row {row}",
                expected=f"token ids from 0 to {vocab - 1}",
                remedy="Use the tokenizer that the model was made with",
            )
        if example.weight:
            found.append((row, example))
    if len(found) < len(wanted):
        _log.warning(
            "%s: %d of %d rows have nothing to learn within %d tokens and are left out",
            rows.source,
            len(wanted) - len(found),
            len(wanted),
            length,
        )
    return Encoded(tuple(example for _, example in found), tuple(row for row, _ in found))


def _check_labels(rows: Rows, objective: Objective, num_labels: int | None) -> None:
    if len(rows) and not rows.labels:
        raise UsageError(
            f"the objective {objective.name!r} needs a class for each row, and these have none",
            where=rows.source,
            expected=f"rows with text and {objective.label_key}",
            remedy="Use a causal language model to learn text without classes",
        )
    if num_labels is not None and rows.num_labels > num_labels:
        row = next(row for row, label in enumerate(rows.labels) if label >= num_labels)
        raise UsageError(
            f"{objective.label_key} {rows.labels[row]}, and the model has {num_labels} classes",
            where=f"{rows.source}, row {row}",
            expected=f"labels from 0 to {num_labels - 1}",
        )


def _ending(codec: TextCodec) -> int:
    """How many special tokens the tokenizer puts after a text (BERT: one, [SEP])."""
    try:
        empty, some = codec.encode(""), codec.encode("a")
    except PromptError:  # it adds none at all
        return 0
    count = 0
    while count < len(empty) and empty[-1 - count] == some[-1 - count] and codec.is_silent(empty[-1 - count]):
        count += 1
    return count


def _sample(rows: Rows, row: int, codec: TextCodec, length: int, ending: int) -> Example:
    ids = codec.encode(rows.texts[row])
    if len(ids) > length:
        ids = ids[: length - ending] + ids[len(ids) - ending :]
    return Example(tuple(ids), rows.labels[row], 1)


def _tokens(rows: Rows, row: int, codec: TextCodec, objective: Objective, length: int) -> Example:
    text, given = rows.texts[row], 0
    if rows.answers:
        prompt = prompt_of(text)
        text = prompt + rows.answers[row]
        ids = codec.encode(text)
        # A token that holds the end of the question and the beginning of the answer belongs to the answer.
        before = codec.encode(prompt)
        given = next((i for i, (a, b) in enumerate(zip(ids, before, strict=False)) if a != b), len(before))
    else:
        ids = codec.encode(text)
    if codec.eos_ids and ids[-1] not in codec.eos_ids:
        ids.append(min(codec.eos_ids))
    ids = ids[:length]
    labels = tuple(IGNORED if i < given else token for i, token in enumerate(ids))
    return Example(tuple(ids), labels, objective.count(torch.tensor([labels], dtype=torch.int64)))
