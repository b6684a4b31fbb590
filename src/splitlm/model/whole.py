"""A model as transformers itself loads it: the source of ``--loader hf`` and of the uncut reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from splitlm.core.errors import CheckpointError
from splitlm.model.border import foreign
from splitlm.model.oneatatime import one_at_a_time
from splitlm.model.quiet import no_bars


def whole_model(folder: Path, dtype: torch.dtype) -> Any:
    """The causal model, all of it, by ``from_pretrained``.

    Raises:
        CheckpointError: transformers cannot load it, or would fill a tensor that is missing with noise.
    """
    expected = "a model directory whose config and tensors agree"
    with one_at_a_time(), no_bars(), foreign("transformers cannot load the model", str(folder), expected):
        model, info = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    missing = sorted(map(str, info["missing_keys"]))
    if missing:
        raise CheckpointError(
            f"There is no tensor {', '.join(map(repr, missing[:3]))}{' and more' * (len(missing) > 3)}",
            where=str(folder),
            expected="every tensor of the model that config.json describes",
        )
    return model.eval()


def own_memory(model: Any) -> None:
    """Copy every parameter into memory that torch aligned; a table used twice stays one.

    Other sums come out of memory that is aligned otherwise, such as a mapped file.
    """
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if id(param) not in moved:
                moved[id(param)] = nn.Parameter(param.detach().clone(memory_format=torch.contiguous_format), False)
            setattr(module, name, moved[id(param)])
