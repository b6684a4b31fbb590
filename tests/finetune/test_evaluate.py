"""The joined model is worth what transformers says of it: loss, accuracy, perplexity, and answers by generation."""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch

from splitlm.core.errors import ModelError, UsageError
from splitlm.finetune.data import Rows, prompt_of
from splitlm.finetune.evaluate import evaluate, final_number, join
from splitlm.finetune.output import write_outputs
from splitlm.finetune.recipe import Recipe, open_recipe
from splitlm.model.text import TextCodec
from splitlm.model.tuned import TunedPart
from tests.node.test_tuning import config, model_folder, rows_file
from tests.tiny_tune import CLASSES

CLASSIFIED = Rows("test", ("w1 w2", "w3 w4 w5 w6", "w7", "w8 w9 w1", "w2 w2"), labels=(0, 3, 1, 2, 2))
TEXTS = Rows("test", ("w1 w2 w3", "w3 w4 w5 w6", "w7 w8", "w8 w9 w1 w4 w4 w3 w2"))
LORA: dict[str, Any] = {"fine-tune": {"name": "LoRA", "LoRA": {"r": 4, "alpha": 8}}}


def a_recipe(family: str, folder: Path, **more: Any) -> Recipe:
    """A run's recipe with dropout, which must be off in all of this."""
    model = model_folder(family, folder / "model", 0.5)
    made = config(model, rows_file(folder, "classify" if family == "bert" else "text"), **more)
    return open_recipe(made, model, CLASSES if family == "bert" else 0)


def trained(recipe: Recipe, *, parts: bool = False) -> dict[str, torch.Tensor]:
    """Other values for all that is trained; ``parts``: as parties hold it, who tie nothing across their borders."""
    held: dict[str, torch.Tensor] = {}
    for segment in recipe.segments if parts else ():
        part = TunedPart(recipe.files.load([segment])[0], recipe.files)
        held |= {name: p.detach() for name, p in part.parameters().items()}
    held = held or {name: p.detach() for name, p in join(recipe, own(recipe)).parameters().items()}
    generator = torch.Generator().manual_seed(4)
    return {name: t + 0.05 * torch.randn(t.shape, generator=generator) for name, t in held.items()}


def own(recipe: Recipe) -> dict[str, torch.Tensor]:
    """What is trained, as it begins."""
    from splitlm.core.cut import Segment

    whole = Segment(0, recipe.files.blocks, embed=True, head=True)
    part = TunedPart(recipe.files.load([whole])[0], recipe.files, lora=recipe.lora)
    return {name: p.detach() for name, p in part.parameters().items()}


def found(recipe: Recipe, rows: Rows, state: dict[str, torch.Tensor], answers: int = 9) -> dict[str, float]:
    steps = list(evaluate(recipe, rows, state, answers=answers))
    assert steps[:-1] == [None] * (len(steps) - 1)
    assert steps[-1] is not None
    return steps[-1]


def plain(recipe: Recipe, folder: Path, state: dict[str, torch.Tensor]) -> Any:
    """The same model as transformers loads it from what the run leaves."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    auto = AutoModelForSequenceClassification if recipe.files.family.task == "classify" else AutoModelForCausalLM
    left = write_outputs(folder, recipe, state)
    if recipe.lora is None:
        return auto.from_pretrained(left).eval()
    from peft import PeftModel

    return PeftModel.from_pretrained(auto.from_pretrained(recipe.files.folder), str(left)).eval()


@pytest.mark.parametrize("more", [{}, LORA], ids=["full", "lora"])
def test_a_classifiers_loss_and_accuracy_are_those_of_transformers(more: dict[str, Any], tmp_path: Path) -> None:
    recipe = a_recipe("bert", tmp_path, **more)
    state = trained(recipe)
    codec, model = TextCodec(recipe.files.folder), plain(recipe, tmp_path / "out", state)
    with torch.no_grad():
        logits = torch.cat([model(torch.tensor([codec.encode(text)])).logits for text in CLASSIFIED.texts])
    labels = torch.tensor(CLASSIFIED.labels)
    got = found(recipe, CLASSIFIED, state)
    assert got.keys() == {"central_loss", "central_accuracy"}
    assert got["central_accuracy"] == int((logits.argmax(-1) == labels).sum()) / len(labels)
    assert got["central_loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), abs=1e-5)


def test_without_a_metric_no_accuracy_is_told(tmp_path: Path) -> None:
    recipe = a_recipe("bert", tmp_path)
    own = replace(recipe.goal, forward=lambda model, *given: model(*given)[:, :1], loss=lambda output, _: output.mean())
    assert found(replace(recipe, goal=own), CLASSIFIED, trained(recipe)).keys() == {"central_loss"}


@pytest.mark.parametrize(
    ("family", "more", "parts"),
    [
        ("gpt2", {}, False),
        ("llama", LORA, False),
        ("llama", {"server": {"architecture": "two-stage", "cut-layers": 2}}, True),
    ],
    ids=["gpt2", "lora", "head-of-its-own"],
)
def test_a_language_models_perplexity_is_that_of_transformers(
    family: str, more: dict[str, Any], parts: bool, tmp_path: Path
) -> None:
    recipe = a_recipe(family, tmp_path, **more)
    state = trained(recipe, parts=parts)
    assert not parts or recipe.files.family.head_key in state
    codec, model = TextCodec(recipe.files.folder), plain(recipe, tmp_path / "out", state)
    total, items = 0.0, 0
    with torch.no_grad():
        for text in TEXTS.texts:
            ids = torch.tensor([[*codec.encode(text), min(codec.eos_ids)]])
            total += float(model(ids, labels=ids).loss) * (ids.shape[1] - 1)
            items += ids.shape[1] - 1
    got = found(recipe, TEXTS, state)
    assert got.keys() == {"central_loss", "perplexity"}
    assert got["central_loss"] == pytest.approx(total / items, abs=1e-5)
    assert got["perplexity"] == pytest.approx(math.exp(total / items), rel=1e-5)


def test_answers_are_those_that_transformers_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words that stand for a number: whether it is the row's own is decided by what the model says."""
    monkeypatch.setattr("splitlm.finetune.evaluate.ANSWER_TOKENS", 6)
    recipe = a_recipe("llama", tmp_path)
    state = trained(recipe)
    codec, model = TextCodec(recipe.files.folder), plain(recipe, tmp_path / "out", state)
    questions, said = ("w1 w2 w3", "w4", "w5 w6"), []
    for question in questions:
        prompt = torch.tensor([codec.encode(prompt_of(question))])
        made = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, prompt.shape[1] :]
        said.append(codec.decode(made.tolist()))
    number = {text: float(i) for i, text in enumerate(dict.fromkeys(said))}
    assert len(number) > 1, "the test needs answers that differ"
    real = final_number
    monkeypatch.setattr(
        "splitlm.finetune.evaluate.final_number",
        lambda text: Decimal(number[text]) if text in number else real(text),
    )
    right = number[said[0]]
    rows = Rows("test", (*questions, "w9"), answers=(f"w1 #### {right:.0f}",) * 3 + ("none",))
    expected = sum(number[text] == right for text in said) / 3
    assert 0 < expected < 1
    got = found(recipe, rows, state)
    assert got["exact_match"] == expected, "the row without a number is not counted"
    assert found(recipe, rows, state, answers=1)["exact_match"] == 1
    assert "exact_match" not in found(recipe, rows, state, answers=0)


def test_a_question_that_fills_the_context_is_answered_wrongly(tmp_path: Path) -> None:
    recipe = a_recipe("gpt2", tmp_path)
    rows = Rows("test", (" ".join(["w1"] * 64),), answers=("#### 1",))
    assert found(recipe, rows, own(recipe)) == {"exact_match": 0.0}, "nor has it an item for the loss"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it is #### 72", "72"),
        ("####72.", "72"),
        ("#### $1,234.50\nnext #### 5", "1234.5"),
        ("#### -3", "-3"),
        ("#### 1,000", "1000.0"),
        ("72", None),
        ("#### many", None),
        ("####", None),
    ],
)
def test_the_number_after_the_mark(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))


def test_tensors_of_another_model_are_refused(tmp_path: Path) -> None:
    recipe = a_recipe("bert", tmp_path)
    state = own(recipe)
    with pytest.raises(ModelError, match="on one side only"):
        join(recipe, {name: t for name, t in state.items() if "pooler" not in name})


def test_rows_without_classes_are_refused_of_a_classifier(tmp_path: Path) -> None:
    recipe = a_recipe("bert", tmp_path)
    with pytest.raises(UsageError, match="needs a class for each row"):
        list(evaluate(recipe, TEXTS, own(recipe), answers=1))


def test_a_loss_that_is_no_number_is_an_error_that_names_the_rows(tmp_path: Path) -> None:
    recipe = a_recipe("bert", tmp_path)
    state = {name: torch.full_like(t, torch.nan) for name, t in own(recipe).items()}
    with pytest.raises(ModelError, match="test, microbatch 0"):
        list(evaluate(recipe, CLASSIFIED, state, answers=1))
