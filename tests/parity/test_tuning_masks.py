"""A row that is padded trains as the same row alone; adapters that are merged compute as adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from splitlm.core.config import read
from splitlm.core.cut import Segment
from splitlm.finetune.objective import objective_for
from splitlm.finetune.output import write_outputs
from splitlm.finetune.recipe import open_recipe
from splitlm.model.checkpoint import merge
from splitlm.model.stepping import Stepping
from splitlm.model.tunable import TunableFiles
from splitlm.model.tuned import TunedPart
from splitlm.model.uncut_train import UncutTrainer
from tests.tiny_tune import BLOCKS, CLASSES, FAMILIES, batches, build


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_padded_row_is_the_row_alone(family: str, tmp_path: Path) -> None:
    """Its loss, and the gradient of the whole model by it."""
    files = TunableFiles(build(family, tmp_path), dtype="float64", seed=3)
    goal = objective_for(files.family.name)
    part = TunedPart(files.load([Segment(0, BLOCKS, embed=True, head=True)])[0], files)
    classify = family == "bert"
    [batch] = batches(1, classify=classify, seed=4, rows=5, longest=12)
    lengths = batch.mask.sum(dim=1).tolist()
    assert len(set(lengths)) > 2
    output = part.outputs(batch.ids, batch.mask, goal)
    total, alone = 0.0, {}
    for row, length in enumerate(lengths):
        ids, mask = batch.ids[row : row + 1, :length], batch.mask[row : row + 1, :length]
        labels = batch.labels[row : row + 1] if classify else batch.labels[row : row + 1, :length]
        value, items = part.score((0, row), ids, mask, labels, goal, 1.0)
        padded, counted = goal.value(output[row : row + 1], batch.labels[row : row + 1])
        assert value == pytest.approx(float(padded), abs=1e-12) and items == counted
        part.backward((0, row))
        total += value
    alone = {name: p.grad.clone() for name, p in part.parameters().items() if p.grad is not None}
    part.drop()
    value, _ = part.score((0, 0), batch.ids, batch.mask, batch.labels, goal, 1.0)
    part.backward((0, 0))
    assert value == pytest.approx(total, abs=1e-11)
    for name, parameter in part.parameters().items():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, alone[name], rtol=0, atol=1e-6 if not classify else 1e-11, msg=name)


@pytest.mark.parametrize("other", [0, 7])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_what_is_under_the_padding_does_not_matter(family: str, other: int, tmp_path: Path) -> None:
    files = TunableFiles(build(family, tmp_path), dtype="float64", seed=3)
    goal = objective_for(files.family.name)
    part = TunedPart(files.load([Segment(0, BLOCKS, embed=True, head=True)])[0], files)
    [batch] = batches(1, classify=family == "bert", seed=4, rows=5, longest=12)
    ids = torch.where(batch.mask.bool(), batch.ids, 5)
    changed = torch.where(batch.mask.bool(), batch.ids, other)
    a, b = (part.score((0, i), given, batch.mask, batch.labels, goal, 1.0)[0] for i, given in enumerate((ids, changed)))
    assert a == pytest.approx(b, abs=1e-12)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_merged_adapters_compute_as_adapters(family: str, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    folder = build(family, tmp_path / "base")
    settings = {
        "server": {"model-path": str(folder), "tail-blocks": 1},
        "fine-tune": {"name": "LoRA", "LoRA": {"r": 4, "alpha": 8}},
    }
    recipe = open_recipe(read(settings, "test"), folder, CLASSES, dtype="float32")
    how = Stepping(learning_rate=1e-2)
    whole = UncutTrainer(recipe.files, recipe.shape, recipe.segments, recipe.goal, how, lora=recipe.lora)
    classify = family == "bert"
    for window in range(5):
        whole.window(0, window, {0: batches(2, classify=classify, seed=window)})
    [batch] = batches(1, classify=classify, seed=99)
    ours = whole.parts[0].outputs(batch.ids, batch.mask, recipe.goal)
    adapter = write_outputs(tmp_path / "run", recipe, {**whole.own[0], **whole.body})
    merge(folder, adapter, tmp_path / "merged")
    auto = AutoModelForSequenceClassification if classify else AutoModelForCausalLM
    given = {"input_ids": batch.ids, "attention_mask": batch.mask.long()}
    options = {"num_labels": CLASSES} if classify else {}
    here = batch.mask.bool() if not classify else slice(None)
    base = auto.from_pretrained(folder, **options).eval()
    merged = auto.from_pretrained(tmp_path / "merged").eval()
    assert float((base(**given).logits - ours)[here].detach().abs().max()) > 1e-2
    torch.testing.assert_close(merged(**given).logits[here], ours[here], rtol=0, atol=1e-5)
    loaded = PeftModel.from_pretrained(base, str(adapter)).eval()
    torch.testing.assert_close(loaded(**given).logits[here], ours[here], rtol=0, atol=1e-5)
