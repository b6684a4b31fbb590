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


def write_outputs(folder: Path, recipe: Recipe, trained: Mapping[str, torch.Tensor]) -> Path:
    """Write the model or the adapter of a run; where it lies.

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
        stored = sorted({name.split(".")[0] for name in trained if name.startswith(head)})
        save_adapter(
            folder / ADAPTER,
            {PEFT_PREFIX + name: tensor for name, tensor in trained.items()},
            r=lora.r,
            alpha=int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,  # type: ignore[arg-type]
            targets=targets_for(lora, str(files.config.model_type), files.family),
            task=files.family.task,
            base_name=str(files.folder),
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
