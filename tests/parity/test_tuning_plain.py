"""The uncut trainer, which all other parity tests of training compare with, against plain transformers and peft.

Nothing of splitlm computes on the other side: ``from_pretrained``, the model's own loss, torch's AdamW and clipping,
peft's own ``get_peft_model``. The cut is named by the numbers of blocks, and no dropout is on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from splitlm.core.shape import cut_for, find_shape
from splitlm.finetune.objective import objective_for
from splitlm.model.lora import Lora
from splitlm.model.stepping import Stepping
from splitlm.model.tunable import TunableFiles
from splitlm.model.uncut_train import UncutTrainer
from tests.tiny_tune import BLOCKS, FAMILIES, Batch, batches, build

WINDOWS, MICROBATCHES = 50, 2
CUT, TAIL = 1, 1
CLIP, DECAY = 0.5, 0.01
RATE = 2e-3
"""The learning rate of AdamW; of SGD it is ten times as much."""
BLOCK = re.compile(r"\.(?:layer|layers|h)\.(\d+)\.")


def is_body(name: str) -> bool:
    found = BLOCK.search(name)
    return found is not None and CUT <= int(found[1]) < BLOCKS - TAIL


class Plain:
    """Transformers and torch alone."""

    def __init__(self, family: str, folder: Path, dtype: torch.dtype, lora: Lora | None, make: Any) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        self.causal, self.dtype = family != "bert", dtype
        auto = AutoModelForSequenceClassification if family == "bert" else AutoModelForCausalLM
        self.model: Any = auto.from_pretrained(folder, dtype=dtype)
        if lora is not None:
            from peft import LoraConfig, TaskType, get_peft_model

            task = TaskType.SEQ_CLS if family == "bert" else TaskType.CAUSAL_LM
            config = LoraConfig(
                r=lora.r,
                lora_alpha=int(lora.alpha),
                task_type=task,
                fan_in_fan_out=family == "gpt2",
                # peft has no word on some families.
                target_modules=["q_proj", "v_proj"] if family == "starcoder2" else None,
            )
            self.model = get_peft_model(self.model, config, autocast_adapter_dtype=False)
        self.model.train()
        trained = {self.key(n): p for n, p in self.model.named_parameters() if p.requires_grad}
        self.parts = [{n: p for n, p in trained.items() if is_body(n) is inside} for inside in (False, True)]
        self.trained = trained
        self.optimizers = [make(list(part.values())) for part in self.parts]

    @staticmethod
    def key(name: str) -> str:
        return name.removeprefix("base_model.model.").replace(".default.", ".").replace(".modules_to_save.", ".")

    def begin_as(self, others: Mapping[str, nn.Parameter]) -> None:
        """Take the adapters' (and a new head's) first values from elsewhere."""
        assert self.trained.keys() == others.keys()
        for name, parameter in self.trained.items():
            with torch.no_grad():
                parameter.copy_(others[name])

    def loss(self, batch: Batch) -> torch.Tensor:
        given = {"input_ids": batch.ids, "attention_mask": batch.mask.long()}
        if self.causal and self.dtype == torch.float64:  # transformers takes the loss of a language model in float32
            logits = self.model(**given).logits[:, :-1].flatten(0, 1)
            return nn.functional.cross_entropy(logits, batch.labels[:, 1:].flatten())
        mean: torch.Tensor = self.model(**given, labels=batch.labels).loss
        return mean

    def window(self, of: Sequence[Batch]) -> float:
        total = 0.0
        for batch in of:
            loss = self.loss(batch)
            torch.autograd.backward(loss / len(of))
            total += float(loss.detach()) / len(of)
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(list(part.values()), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        return total


def both(family: str, folder: Path, dtype: str, stepping: Stepping, make: Any, lora: Lora | None) -> tuple[Any, ...]:
    """Train both ways; the two sets of parameters, the first ones, and the losses of each window."""
    build(family, folder)
    shape = find_shape("u-shape")
    files = TunableFiles(folder, dtype=dtype, seed=3)
    goal = objective_for(files.family.name)
    ours = UncutTrainer(files, shape, cut_for(shape, BLOCKS, CUT, TAIL), goal, stepping, lora=lora)
    trained: dict[str, nn.Parameter] = ours.own[0] | ours.body
    plain = Plain(family, folder, getattr(torch, dtype), lora, make)
    if lora is not None:
        plain.begin_as(trained)
    first = {name: p.detach().clone() for name, p in trained.items()}
    losses = []
    for window in range(WINDOWS):
        of = batches(MICROBATCHES, classify=family == "bert", seed=window)
        losses.append((ours.window(0, window, {0: of}), plain.window(of)))
    return trained, plain.trained, first, losses


def adamw(eps: float, rate: float = RATE) -> Any:
    return lambda parameters: torch.optim.AdamW(parameters, lr=rate, weight_decay=DECAY, eps=eps)


@pytest.mark.parametrize("lora", [None, Lora(r=4, alpha=8)], ids=["full", "lora"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_fifty_windows_in_float64(family: str, lora: Lora | None, tmp_path: Path) -> None:
    stepping = Stepping(learning_rate=RATE, weight_decay=DECAY, clip_grad_norm=CLIP)
    ours, plain, first, losses = both(family, tmp_path, "float64", stepping, adamw(1e-8), lora)
    assert ours.keys() == plain.keys()
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, plain[name], rtol=0, atol=1e-9, msg=name)
    for a, b in losses:
        assert a == pytest.approx(b, abs=1e-9)
    # The bias of BERT's keys has no gradient: softmax does not see it.
    moved = {n: float((ours[n].detach() - first[n]).abs().max()) for n in ours if not n.endswith("key.bias")}
    assert min(moved.values()) > 1e-3, "a parameter that hardly moved shows nothing"


SGD = Stepping(learning_rate=10 * RATE, weight_decay=DECAY, clip_grad_norm=CLIP, optimizer="sgd")
STEADY = Stepping(learning_rate=RATE, weight_decay=DECAY, clip_grad_norm=CLIP, eps=1e-5)
FP32 = {
    "sgd": (SGD, lambda parameters: torch.optim.SGD(parameters, lr=10 * RATE, weight_decay=DECAY)),
    "adamw-eps-1e-5": (STEADY, adamw(1e-5)),
}


@pytest.mark.parametrize("how", list(FP32))
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_fifty_windows_in_float32(family: str, how: str, tmp_path: Path) -> None:
    stepping, make = FP32[how]
    ours, plain, _, losses = both(family, tmp_path, "float32", stepping, make, None)
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, plain[name], rtol=0, atol=1e-5, msg=name)
    assert losses[-1][0] == pytest.approx(losses[-1][1], abs=1e-5)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama-untied"])
def test_plain_adamw_in_float32_agrees_on_the_loss(family: str, tmp_path: Path) -> None:
    """Where the true gradient is zero AdamW makes whole steps of its rounding: weights tell nothing there."""
    stepping = Stepping(learning_rate=RATE, weight_decay=DECAY, clip_grad_norm=CLIP)
    *_, losses = both(family, tmp_path, "float32", stepping, adamw(1e-8), None)
    for a, b in losses:
        assert a == pytest.approx(b, abs=1e-4)
