"""What a run leaves for others: a model directory that transformers loads, or an adapter that peft loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from splitlm.core.cut import Segment
from splitlm.finetune.recipe import Recipe
from splitlm.model.checkpoint import PEFT_PREFIX, save_adapter, save_full
from splitlm.model.lora import targets_for
from splitlm.model.tuned import TunedPart

MODEL, ADAPTER = "model", "adapter"
BASE = "base"
"""Folder beside an adapter with the model that it changes, where no directory elsewhere holds just that model."""


def write_outputs(folder: Path, recipe: Recipe, trained: Mapping[str, torch.Tensor]) -> Path:
    """Write the model or the adapter of a run; where it lies.

    Where the run began with anything else than its model's directory, that is written too, once, for the adapter.

    Args:
        folder: of the run.
        recipe: of the run.
        trained: what its parties trained, by name in the whole model.

    Raises:
        SplitlmError: it cannot be written; what was there before is untouched.
    """
    files, lora = recipe.files, recipe.lora
    if lora is not None:
        head = f"{files.family.head}."
        base = files.folder if is_plain(recipe) else folder.absolute() / BASE
        if not is_plain(recipe) and not (base / "config.json").is_file():
            write_base(recipe, base)
        stored = sorted({name.split(".")[0] for name in trained if name.startswith(head)})
        save_adapter(
            folder / ADAPTER,
            {PEFT_PREFIX + name: tensor for name, tensor in trained.items()},
            r=lora.r,
            alpha=int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,  # type: ignore[arg-type]
            targets=targets_for(lora, str(files.config.model_type), files.family),
            task=files.family.task,
            base_name=str(base),
            modules_to_save=stored,
            fan_in_fan_out=files.family.name == "gpt2",
        )
        return folder / ADAPTER
    whole = TunedPart(files.load([Segment(0, files.blocks, embed=True, head=True)])[0], files)
    tensors = whole.weights()
    for name, tensor in trained.items():
        tensors[name] = tensor
    config = files.config
    if files.tied and files.family.head_key in trained:
        config.tie_word_embeddings = False  # the last part's table went its own way
    elif files.tied:
        tensors.pop(files.family.head_key, None)
    save_full(folder / MODEL, tensors, config, files.folder)
    return folder / MODEL


def is_plain(recipe: Recipe) -> bool:
    """Whether the run began with what lies in its model's directory: all blocks of it, and nothing that was made."""
    config = recipe.config
    return config.n_block is None and config.server.parameters.load and recipe.files.family.task == "causal"


def write_base(recipe: Recipe, folder: Path) -> None:
    """Write the model that the run began with, as a directory that transformers loads.

    Raises:
        SplitlmError: it cannot be written.
    """
    files = recipe.files
    whole = TunedPart(files.load([Segment(0, files.blocks, embed=True, head=True)])[0], files)
    tensors = whole.weights()
    if files.tied:
        tensors.pop(files.family.head_key, None)
    save_full(folder, tensors, files.config, files.folder)
