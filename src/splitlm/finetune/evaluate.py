"""What the average of a round is worth: the joined model, held against rows that the coordinator itself has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation

import torch

from splitlm.core.cut import Segment
from splitlm.finetune.data import Rows, microbatches, prompt_of
from splitlm.finetune.recipe import Recipe, encoded
from splitlm.finetune.scoring import Score, look
from splitlm.model.text import TextCodec
from splitlm.model.tuned import TunedPart, load_into, untie
from splitlm.model.uncut import Uncut
from splitlm.telemetry.summary import perplexity

ANSWER_TOKENS = 256
"""Tokens of a generated answer, at most; those of GSM8K have 50 to 250."""
_FINAL = re.compile(r"####\s*\$?\s*(-?[\d,]*\.?\d+)")


def evaluate(
    recipe: Recipe, rows: Rows, trained: Mapping[str, torch.Tensor], *, answers: int
) -> Iterator[dict[str, float] | None]:
    """Evaluate step by step: None after each microbatch and each answer, and at last what was found.

    ``central_loss`` in every case, a mean over items; ``central_accuracy`` of a classifier, unless its objective has no
    metric; ``perplexity`` of a language model; ``exact_match`` of one whose rows are questions with a number after
    ``####`` in their answers.

    Args:
        recipe: of the run.
        rows: to be held against.
        trained: what the parties trained, by name in the whole model.
        answers: rows that are answered by generation, at most.

    Raises:
        ModelError: the loss is not finite, or the tensors are not those of the model. Otherwise as ``ModelFiles.load``.
        UsageError: the rows are not of this model's task.
    """
    goal, codec = recipe.goal, TextCodec(recipe.files.folder)
    whole, score = join(recipe, trained), Score()
    size = recipe.config.learning.batch_size
    for batch in microbatches(encoded(recipe, codec, rows, range(len(rows))), size, seed=0, round=0):
        place = f"{rows.source}, microbatch {batch.index}"
        score = score.plus(look(whole, goal, batch.ids, batch.mask, batch.labels, place))
        yield None
    found: dict[str, float] = {}
    if score.items:
        found["central_loss"] = loss = score.loss / score.items
        if goal.token_loss:
            found["perplexity"] = perplexity(loss)
        elif score.counted:
            found["central_accuracy"] = score.correct / score.counted
    right = asked = 0
    if rows.answers and goal.token_loss:
        for correct in _answered(recipe, whole, codec, rows, answers):
            right, asked = right + correct, asked + 1
            yield None
    if asked:
        found["exact_match"] = right / asked
    yield found


def join(recipe: Recipe, trained: Mapping[str, torch.Tensor]) -> TunedPart:
    """The whole model, with what the parties trained in its place.

    Raises:
        ModelError: the tensors are not those that this run trains. Otherwise as ``ModelFiles.load``.
    """
    files = recipe.files
    part = files.load([Segment(0, files.blocks, embed=True, head=True)])[0]
    whole = TunedPart(part, files, lora=recipe.lora, frozen_embedding=recipe.frozen_embedding)
    if files.tied and files.family.head_key in trained:
        untie(whole, files)  # the last part's table went its own way
    load_into(whole.parameters(), trained)
    return whole


def final_number(text: str) -> Decimal | None:
    """The number after the first ``####``, without separators of thousands; None where there is none."""
    if (found := _FINAL.search(text)) is None:
        return None
    try:
        return Decimal(found[1].replace(",", ""))
    except InvalidOperation:
        return None


def _answered(recipe: Recipe, whole: TunedPart, codec: TextCodec, rows: Rows, most: int) -> Iterator[bool]:
    """Whether each of the first rows that have a number is answered by it. A question that fills the context is not."""
    uncut = Uncut(recipe.files, model=whole.part.module)
    wanted = ((text, final_number(answer)) for text, answer in zip(rows.texts, rows.answers, strict=True))
    asked = [(text, number) for text, number in wanted if number is not None][:most]
    for question, number in asked:
        prompt = codec.encode(prompt_of(question))
        if len(prompt) >= recipe.files.context:
            yield False
            continue
        made = uncut.generate(prompt, ANSWER_TOKENS, prefill_chunk=len(prompt), eos_ids=codec.eos_ids)
        yield final_number(codec.decode([token for token, _ in made])) == number
