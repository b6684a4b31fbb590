"""LoRA adapters on a segment, by peft, begun alike whatever the cut.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021. The product ``B·A`` is scaled by ``alpha / r``; A
begins as peft begins it, from a seed of the module's name in the whole model, and B with zeros.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from splitlm.core.errors import UsageError
from splitlm.model.family import Family
from splitlm.model.generator import draws_apart
from splitlm.model.tunable import TunableFiles, seed_of

ADAPTER = "default"


class Lora(msgspec.Struct, frozen=True):
    """What is adapted.

    Attributes:
        r: rank.
        alpha: scale of the product, divided by ``r``.
        targets: names of the modules; empty for the usual ones of the model's type.
    """

    r: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ()


def targets_for(lora: Lora, model_type: str, family: Family) -> tuple[str, ...]:
    """The modules that are adapted, sorted: those that were named, or those of peft, or those of the family's row."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    return tuple(sorted(lora.targets or KNOWN.get(model_type) or family.lora))


def check_targets(lora: Lora, files: TunableFiles) -> None:
    """Make sure that a model's blocks have the modules that are adapted; no weights are read.

    Raises:
        UsageError: they lack one.
    """
    model_type = str(files.config.model_type)
    there = {name.rpartition(".")[2] for name, _ in files.block().named_modules()} - {""}
    lost = [name for name in targets_for(lora, model_type, files.family) if name not in there]
    if lost:
        raise UsageError(
            f"The blocks of the {model_type} model have no module {lost[0]!r} to adapt",
            where="fine-tune.LoRA",
            expected=f"some of {', '.join(sorted(there))}",
            remedy="Train all weights with fine-tune.name: full",
        )


def adapt(module: nn.Module, lora: Lora, targets: tuple[str, ...]) -> list[nn.Module]:
    """Put adapters on the targets below a module, in place; the layers that got one, to be begun by ``begin``.

    Only adapters are trainable afterwards. A module without any target is left as it is.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    module.requires_grad_(False)
    if not any(name.rpartition(".")[2] in targets for name, _ in module.named_modules()):
        return []
    turned = any(isinstance(m, Conv1D) for n, m in module.named_modules() if n.rpartition(".")[2] in targets)
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # any number does
        target_modules=list(targets),
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=turned,  # GPT-2 keeps its matrices the other way round
    )
    with draws_apart():
        inject_adapter_in_model(config, module, adapter_name=ADAPTER)
    return [layer for layer in module.modules() if isinstance(layer, LoraLayer)]


def begin(layer: Any, name: str, seed: int, dtype: torch.dtype) -> None:
    """Begin one adapter: A uniform as ``nn.Linear`` begins, B zero.

    Args:
        layer: of peft.
        name: of the adapted module in the whole model.
        seed: of the run.
        dtype: element type of the adapter; that of the weights it changes.
    """
    a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    generator = torch.Generator().manual_seed(seed_of(seed, "lora", name))
    made = torch.empty(a.shape, dtype=torch.float32)
    nn.init.kaiming_uniform_(made, a=math.sqrt(5), generator=generator)
    a.data = made.to(dtype)
    b.data = torch.zeros(b.shape, dtype=dtype)
