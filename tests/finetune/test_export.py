"""What a run made loads elsewhere, and is what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from splitlm.core.config import read, resolved
from splitlm.core.errors import UsageError
from splitlm.finetune.evaluate import join
from splitlm.finetune.export import export
from splitlm.finetune.output import BASE, write_outputs
from splitlm.finetune.recipe import Recipe, open_recipe
from splitlm.model.source import resolve
from tests.tiny_tune import BLOCKS, CLASSES, VOCAB, build

IDS = torch.tensor([[5, 6, 7, 8, 9], [11, 12, 13, 14, 15]])


def made_run(
    folder: Path, family: str, server: dict[str, Any] | None = None, *, lora: bool, fresh: bool = True
) -> tuple[Path, Recipe]:
    """A run's folder as a complete round leaves it, with weights that no initialisation gives."""
    model = build(family, folder / "base") if fresh else folder / "base"
    settings: dict[str, Any] = {
        "server": {"model-name": str(model), "model-path": str(model), "tail-blocks": 1, **(server or {})},
        "fine-tune": {"name": "LoRA" if lora else "full", "LoRA": {"r": 4, "alpha": 8}},
    }
    config = read(settings)
    recipe = open_recipe(config, model, CLASSES)
    run = folder / "run"
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(resolved(config)))))
    write_outputs(run, recipe, _trained(recipe))
    return run, recipe


def _trained(recipe: Recipe) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        name: p.detach() + 0.05 * torch.randn(p.shape, generator=draw)
        for role in ("owner", "worker")
        for name, p in recipe.party(role, 0).parameters.items()
    }


def find(name: str, weights: bool) -> Path:
    return resolve(name, weights=weights, offline=True)


def wanted(run: Path, recipe: Recipe) -> torch.Tensor:
    """Logits of what was trained, by our own joining of it."""
    from safetensors.torch import load_file

    prefix = "base_model.model." if recipe.lora else ""
    path = run / ("adapter/adapter_model.safetensors" if recipe.lora else "model/model.safetensors")
    tensors = {key.removeprefix(prefix): tensor for key, tensor in load_file(path).items()}
    whole = join(recipe, {name: tensor for name, tensor in tensors.items() if name in _names(recipe)})
    return whole.outputs(IDS, torch.ones_like(IDS, dtype=torch.uint8), recipe.goal)


def _names(recipe: Recipe) -> set[str]:
    return {name for role in ("owner", "worker") for name in recipe.party(role, 0).parameters}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found


def auto(recipe: Recipe) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    return AutoModelForSequenceClassification if recipe.files.family.task == "classify" else AutoModelForCausalLM


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2"])
def test_a_whole_model_is_exported_as_it_is(family: str, tmp_path: Path) -> None:
    run, recipe = made_run(tmp_path, family, lora=False)
    export(run, tmp_path / "out", "as it is", find)
    ours = wanted(run, recipe)
    torch.testing.assert_close(logits(auto(recipe).from_pretrained(tmp_path / "out")), ours, rtol=0, atol=1e-5)
    for kind in ("merged", "adapter"):
        with pytest.raises(UsageError, match="no adapter"):
            export(run, tmp_path / "other", kind, find)


@pytest.mark.parametrize(
    ("family", "server", "beside"),
    [("llama", {}, False), ("gpt2", {}, False), ("bert", {}, True), ("llama", {"n": BLOCKS - 1}, True)],
)
def test_an_adapter_is_exported_alone_and_merged(
    family: str, server: dict[str, Any], beside: bool, tmp_path: Path
) -> None:
    """Where the directory of the base is not just what the run began with, that is written beside the adapter."""
    from peft import PeftModel

    if server:
        server = {"model": {str(tmp_path / "base"): {"n_block": server["n"]}}}
    run, recipe = made_run(tmp_path, family, server, lora=True)
    ours = wanted(run, recipe)
    export(run, tmp_path / "whole", "merged", find)
    merged = auto(recipe).from_pretrained(tmp_path / "whole")
    assert merged.config.num_hidden_layers == recipe.files.blocks
    torch.testing.assert_close(logits(merged), ours, rtol=0, atol=1e-5)
    export(run, tmp_path / "alone", "adapter", find)
    assert (tmp_path / "alone" / BASE).is_dir() is beside
    said = json.loads((tmp_path / "alone" / "adapter_config.json").read_text())
    options = {"num_labels": CLASSES} if family == "bert" else {}
    base = auto(recipe).from_pretrained(said["base_model_name_or_path"], **options)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "alone"))
    torch.testing.assert_close(logits(loaded), ours, rtol=0, atol=1e-5)


def test_a_runs_own_adapter_names_the_model_that_was_trained(tmp_path: Path) -> None:
    """Some blocks of a language model without a classifier: pooler and head were made here."""
    from peft import PeftModel
    from safetensors.torch import load_file, save_file

    model = build("bert", tmp_path / "base")
    kept = {k: t for k, t in load_file(model / "model.safetensors").items() if not k.startswith("classifier")}
    kept = {k: t for k, t in kept.items() if "pooler" not in k}
    save_file(kept, model / "model.safetensors", {"format": "pt"})
    run, recipe = made_run(tmp_path, "bert", {"model": {str(model): {"n_block": BLOCKS - 1}}}, lora=True, fresh=False)
    said = json.loads((run / "adapter" / "adapter_config.json").read_text())
    base = auto(recipe).from_pretrained(said["base_model_name_or_path"])
    assert base.config.num_hidden_layers == BLOCKS - 1
    found = logits(PeftModel.from_pretrained(base, str(run / "adapter")))
    torch.testing.assert_close(found, wanted(run, recipe), rtol=0, atol=1e-5)
    before = (run / BASE / "model.safetensors").stat()
    write_outputs(run, recipe, _trained(recipe))
    after = (run / BASE / "model.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns), "it is written once"


def test_what_is_no_run_or_made_nothing_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run here"):
        export(tmp_path, tmp_path / "out", "as it is", find)
    (tmp_path / "config.yaml").write_text("name: x\n")
    with pytest.raises(UsageError, match=r"made no model.*parameters\.save"):
        export(tmp_path, tmp_path / "out", "as it is", find)
    assert not (tmp_path / "out").exists()


def test_another_folder_is_not_overwritten(tmp_path: Path) -> None:
    run, _ = made_run(tmp_path, "llama", lora=False)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="no checkpoint"):
        export(run, tmp_path / "mine", "as it is", find)
    with pytest.raises(UsageError, match="lies there already"):
        export(run, run / "model", "as it is", find)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    export(run, tmp_path / "out", "as it is", find)
    export(run, tmp_path / "out", "as it is", find)  # a checkpoint may be replaced
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == VOCAB
