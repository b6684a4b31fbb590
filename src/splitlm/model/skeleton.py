"""Models without weights: built on the meta device, with what a segment does not hold left out.

A segment is transformers' own causal model, with fewer blocks and with an Identity where another stage has the
embedding, the norm or the head. Its blocks know the whole model's config and their index in it; the base model, which
only walks its blocks and makes masks for them, sees a config of as many layers as are here.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from splitlm.core.cut import Segment
from splitlm.core.errors import CheckpointError, ModelError, UnknownFamilyError
from splitlm.model.border import foreign
from splitlm.model.family import Family, check_layout
from splitlm.model.oneatatime import one_at_a_time

BlockFactory = Callable[[int], nn.Module]
AUTO: dict[str, Any] = {"causal": AutoModelForCausalLM, "classify": AutoModelForSequenceClassification}
"""Class of transformers that builds a whole model, by what its head is for."""


class NoPositions(nn.Module):
    """Stands where learned positions were already added by an earlier stage."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._nothing = torch.full((), -0.0, dtype=dtype)  # adding it changes no number, not even a −0

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        """What is added instead of a position's embedding."""
        return self._nothing


class Embedded(nn.Module):
    """Stands for a module that embeds, adds positions and normalises, where an earlier stage did all that."""

    def forward(self, inputs_embeds: torch.Tensor, **_: Any) -> torch.Tensor:
        """What came, as it is."""
        return inputs_embeds


class Blocks(nn.ModuleList):
    """A list of blocks that is its own whole slice.

    Base models walk ``layers[:num_hidden_layers]``, for which torch would register every block anew at every step.
    """

    def __getitem__(self, idx: Any) -> Any:
        """One block, or some."""
        if isinstance(idx, slice) and idx.start is None and idx.step is None and (idx.stop or 0) >= len(self) > 0:
            return self
        return super().__getitem__(idx)


def build_skeleton(config: Any, family: Family, dtype: torch.dtype, where: str) -> Any:
    """The causal model on meta, with no block in it.

    Raises:
        CheckpointError: transformers cannot build it.
        UnknownFamilyError: it does not have its family's layout.
    """
    # All kinds of layers stay in the config: rotary modules make the frequencies of each kind that they find there.
    config = copy.deepcopy(config)
    config.num_hidden_layers = 0
    with foreign("transformers cannot build the model", where, f"the config of a {family.name} model"):
        with one_at_a_time(), torch.device("meta"):
            model = AUTO[family.task].from_config(config, dtype=dtype, trust_remote_code=False)
        check_layout(model, family, where)
        return model.eval()


def block_factory(skeleton: Any, config: Any, family: Family, dtype: torch.dtype, where: str) -> BlockFactory:
    """A maker of fresh meta blocks; each knows its index in the whole model. It keeps none of them alive.

    It sets nothing of the process (unlike ``from_config``), so a thread may make blocks while another computes.

    Raises:
        UnknownFamilyError: the model does not name its block class. The maker raises
        CheckpointError: transformers cannot build the block.
        ModelError: the block that came is not fresh.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = skeleton.config._attn_implementation
    base = type(getattr(skeleton, family.base))
    names = [family.block] if family.block else list(getattr(base, "_no_split_modules", None) or ())
    module = sys.modules[base.__module__]
    block: Any = next((getattr(module, name) for name in names if hasattr(module, name)), None)
    if block is None:
        raise UnknownFamilyError(
            f"{base.__name__} does not name its block class",
            where=where,
            expected="a class named in _no_split_modules",
        )

    def make(index: int) -> nn.Module:
        with foreign(f"transformers cannot build block {index}", where, f"the config of a {family.name} model"):
            with torch.device("meta"):
                made: nn.Module = block(config, layer_idx=index)
            for param in made.parameters():
                if not param.is_meta:
                    raise ModelError(
                        f"Block {index} came with values in it",
                        where=where,
                        expected="a fresh block without any",
                        remedy="Report it with the model's name",
                    )
                if param.is_floating_point():
                    param.data = param.data.to(dtype)
                param.requires_grad_(False)
            return made.eval()

    return make


def leave_out(model: Any, family: Family, segment: Segment, dtype: torch.dtype) -> None:
    """Put placeholders where another segment has the embedding, or the norm and the head."""
    base = getattr(model, family.base)
    if not segment.embed:
        whole = family.task == "classify"  # its embedding adds positions itself
        setattr(base, family.embed, Embedded() if whole else nn.Identity())
        for name, module in base.named_children():
            if isinstance(module, nn.Dropout):  # after the embedding
                setattr(base, name, nn.Identity())
        if family.positions:
            setattr(base, family.positions, NoPositions(dtype))
        if family.scale:
            setattr(base, family.scale, 1.0)
        if hasattr(base, "embedding_dropout"):  # a rate that its forward applies to whatever enters it
            base.embedding_dropout = 0.0
    if not segment.head:
        setattr(base, family.norm, None if family.task == "classify" else nn.Identity())
        setattr(model, family.head, nn.Identity())


@torch.no_grad()
def check_walk(model: Any, family: Family, hidden: int, dtype: torch.dtype, where: str) -> None:
    """Make sure that a base model without embedding hands its blocks what it was given, for a type of no family's own.

    One that scales or projects what enters it would do so on every stage. To be called once its buffers are filled.

    Raises:
        UnknownFamilyError: it does.
    """
    base = getattr(model, family.base)
    norm, blocks = getattr(base, family.norm), family.blocks_of(base)
    given = torch.linspace(-2, 2, 2 * hidden, dtype=dtype).reshape(1, 2, hidden)
    try:
        setattr(base, family.norm, nn.Identity())
        family.set_blocks(base, nn.ModuleList())
        with foreign("The model cannot be walked without blocks", where, f"a model of the {family.name} layout"):
            passed = base(inputs_embeds=given.clone(), use_cache=False)[0]
    finally:
        setattr(base, family.norm, norm)
        family.set_blocks(base, blocks)
    if not torch.equal(passed, given):
        raise UnknownFamilyError(
            f"{type(base).__name__} changes what it is given before its blocks see it",
            where=where,
            expected=f"hidden states to pass as they are, as in the {family.name} family",
            remedy="A cut of it would compute something else; use it uncut elsewhere",
        )


def set_blocks(model: Any, family: Family, segment: Segment, blocks: list[nn.Module], whole: Any) -> None:
    """Give the base model its blocks, and a config with as many layers as they are, of their kinds.

    Args:
        whole: the whole model's config; the blocks keep it.
    """
    base = getattr(model, family.base)
    family.set_blocks(base, Blocks(blocks))
    config = copy.deepcopy(whole)
    config.num_hidden_layers = segment.count
    for name in family.per_block:
        values = getattr(whole, name, None)
        if values is not None:
            setattr(config, name, [values[i] for i in segment.blocks])
    config._attn_implementation = model.config._attn_implementation
    model.config = base.config = config
    if hasattr(base, "has_sliding_layers"):
        base.has_sliding_layers = "sliding_attention" in (config.layer_types or ())


@torch.no_grad()
def compute_buffers(model: Any, where: str) -> None:
    """Fill buffers that no checkpoint stores (rotary frequencies, embedding scales), as transformers initialises them.

    To be called while the parameters are on meta: a module's parameters are initialised along with its buffers.

    Raises:
        CheckpointError: a buffer that transformers does not know how to fill.
    """
    for name, module in model.named_modules():
        lost = [
            b for b, t in module.named_buffers(recurse=False) if t.is_meta and b in module._non_persistent_buffers_set
        ]
        if not lost:
            continue
        for b in lost:
            like = getattr(module, b)
            if like.dtype == torch.bool:  # no value of it could tell whether it was filled
                raise _unfilled(name, b, where)
            setattr(module, b, torch.full_like(like, _unset(like.dtype), device="cpu"))
        with foreign(f"transformers cannot compute the buffers of {name}", where, "a config that it can use"):
            model._init_weights(module)
        for b in lost:
            now = getattr(module, b)
            empty = now.isnan() if now.is_floating_point() else now == _unset(now.dtype)
            if bool(empty.any()):
                raise _unfilled(name, b, where)


def _unset(dtype: torch.dtype) -> float:
    """A value that no buffer has once it is filled."""
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min


def _unfilled(module: str, buffer: str, where: str) -> CheckpointError:
    return CheckpointError(
        f"The buffer {module}.{buffer} could not be computed",
        where=where,
        expected="a buffer that transformers initialises",
        remedy="Report it with the model's name; --loader hf may work meanwhile",
    )
