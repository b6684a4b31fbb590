"""The uncut reference, given the numbers that an engine with float16 weights holds.

What such an engine rounds is found here anew, from transformers' modules and the cut, and not asked of the engine: a
matrix that it packed wrongly would otherwise be wrong on both sides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from splitlm.core.cut import Cut
from splitlm.model.compute.fused import LAYOUTS
from splitlm.model.compute.products import HALF_MAX
from splitlm.model.load import ModelFiles

HALVES = ("fast",)
"""Engines with float16 weights."""


@dataclass(frozen=True)
class Held:
    """What of a model is held in float16.

    Attributes:
        blocks: whose linear layers.
        head: the head's matrix.
        table: the embedding too, where it is the head's matrix.
        fused: matrices with one input are one, and stay in float32 together where one of them does not fit.
    """

    blocks: frozenset[int] = frozenset()
    head: bool = False
    table: bool = False
    fused: bool = True

    def __bool__(self) -> bool:
        return bool(self.blocks) or self.head


@dataclass
class Rounding:
    """What rounding did.

    Attributes:
        numbers: that were rounded.
        inexact: of them, those that float16 does not hold exactly.
        left: matrices that do not fit float16, left as they were.
    """

    numbers: int = 0
    inexact: int = 0
    left: int = 0
    by_block: dict[int, int] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Of the numbers, those that float16 does not hold exactly."""
        return self.inexact / self.numbers if self.numbers else 0.0

    @property
    def told(self) -> str:
        """In one line."""
        if not self.inexact:
            return f"float16 holds all {self.numbers:,} numbers of the linear layers exactly"
        return (
            f"the reference's linear layers are rounded to float16, as the engine's are: "
            f"it does not hold {self.share:.2%} of {self.numbers:,} numbers exactly"
        )


def halves(engine: str) -> bool:
    """Whether an engine, by the name it gives itself, holds weights in float16."""
    return re.split(r"[ ,(]", engine)[0] in HALVES


def held_by(files: ModelFiles, cut: Cut, engines: Sequence[str]) -> Held:
    """What the nodes of a cut hold in float16.

    Args:
        engines: of each node, by the names they give themselves.
    """
    segments = [(node, segment) for node, segment in zip(cut.nodes, cut.segments, strict=True) if halves(engines[node])]
    head = {node for node, segment in segments if segment.head}
    return Held(
        frozenset(block for _, segment in segments for block in segment.blocks),
        bool(head),
        files.tied and files.dtype is torch.float32 and any(s.embed and node in head for node, s in segments),
        not any("linear layers only" in engine for engine in engines),
    )


def round_to_half(model: Any, files: ModelFiles, held: Held) -> Rounding:
    """Round a whole causal model of transformers in place; a table that is also the head comes apart where it must."""
    found, base = Rounding(), getattr(model, files.family.base)
    for index, block in enumerate(files.family.blocks_of(base)):
        if index in held.blocks:
            before = found.inexact
            for group in _groups(block, held.fused):
                _round(group, found)
            found.by_block[index] = found.inexact - before
    head, table = getattr(model, files.family.head), getattr(base, files.family.embed)
    # A kind of embedding that is not known stays as it was, on the engine's side too.
    known = type(table) is nn.Embedding or isinstance(getattr(table, "embed_scale", None), torch.Tensor)
    if held.head and isinstance(head, nn.Linear) and _round([head], found) and held.table and known:
        table.weight = head.weight
    return found


def _groups(block: Any, fused: bool) -> Iterator[list[Any]]:
    """The linear layers of a block, those together that are packed together."""
    layout = LAYOUTS.get(type(block).__name__) if fused else None
    if layout is None:
        for layer in block.modules():
            if type(layer).__name__ == "Conv1D" or type(layer) is nn.Linear:
                yield [layer]
        return
    attention, mlp = getattr(block, layout.attention), getattr(block, layout.mlp)
    yield [getattr(attention, name) for name in layout.query]
    yield [getattr(attention, layout.out)]
    yield [getattr(mlp, name) for name in layout.up]
    yield [getattr(mlp, layout.down)]


def _round(layers: Sequence[Any], found: Rounding) -> bool:
    """Round matrices that are packed together; whether they fit."""
    if any(float(layer.weight.detach().abs().max()) > HALF_MAX for layer in layers):
        found.left += len(layers)
        return False
    for layer in layers:
        weight = layer.weight.detach()
        rounded = weight.half().to(weight.dtype)
        found.numbers += weight.numel()
        found.inexact += int((rounded != weight).sum())
        layer.weight = nn.Parameter(rounded, False)
    return True
