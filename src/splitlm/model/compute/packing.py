"""From modules as they were loaded to packed ones: block by block, so that both are in memory for one block at most."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from splitlm.model.cache import SessionCache
from splitlm.model.compute.attention import Rotary
from splitlm.model.compute.fused import LAYOUTS, FusedBlock, Rows, matrix
from splitlm.model.compute.products import Kind, PlainProduct, Product
from splitlm.model.family import Family

TRIAL_ROWS = 40
"""So many that what computes several rows at a time does, and has some left over."""
_PARTS = (slice(0, TRIAL_ROWS - 1), slice(TRIAL_ROWS - 1, TRIAL_ROWS))
COUNTED_ROWS = 16
"""Of so many rows one is looked at for numbers that float16 does not hold exactly."""


class Swapped(nn.Module):
    """A packed product where a linear layer of transformers was: any leading dimensions, any element type."""

    def __init__(self, product: Product, dtype: torch.dtype) -> None:
        super().__init__()
        self.product, self.dtype = product, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[…, in]`` to ``[…, out]``."""
        out: torch.Tensor = self.product(x.reshape(-1, x.shape[-1]).float())
        return out.view(*x.shape[:-1], -1).to(self.dtype)


class HalfTable(nn.Module):
    """A token embedding in float16, where the head holds the same numbers packed: both take what the table took.

    Args:
        weight: ``[vocab, hidden]``.
        scale: by which rows are multiplied, in ``dtype``; None for none.
        dtype: of what comes out.
    """

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.half(), False)
        self.scale = None if scale is None else scale.to(dtype)
        self.dtype = dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids of any shape to ``[…, hidden]``."""
        rows = nn.functional.embedding(ids, self.weight).to(self.dtype)
        return rows if self.scale is None else rows * self.scale


class Packing:
    """Packs the blocks and the head of one process's segments in one way.

    Attributes:
        kind: how.
        fused: whether blocks are rebuilt in few operations; else only their linear layers are exchanged.
        ms: spent on packing.
        packed: matrices that were.
        left: matrices that could not be, and stay in float32, each with the reason.
        inexact: numbers that float16 cannot hold exactly, of ``numbers`` looked at: of the fast kind.
    """

    def __init__(self, kind: Kind, family: Family) -> None:
        self.kind, self.family = kind, family
        self.fused = True
        self.ms = 0.0
        self.packed = 0
        self.left: list[str] = []
        self.inexact, self.numbers = 0, 0
        self._tried = False

    def block(self, block: nn.Module, base: Any) -> nn.Module:
        """A block that computes the same from packed weights; the one that came is used up.

        Args:
            base: the model it belongs to, for its rotary module.
        """
        started = time.perf_counter()
        if type(block).__name__ not in LAYOUTS:
            self.fused = False
        made: nn.Module | None = None
        if self.fused:
            made = self._fuse(block, base)
        used = [block]
        if made is None:
            made, used = block, []
            for owner in list(block.modules()):
                for name, layer in list(owner.named_children()):
                    if type(layer).__name__ == "Conv1D" or type(layer) is nn.Linear:
                        setattr(owner, name, self._swap(layer))
                        used.append(layer)
        _release(*used)
        self.ms += (time.perf_counter() - started) * 1e3
        return made

    def head(self, model: Any) -> None:
        """Pack the output head of a model that has one."""
        head = getattr(model, self.family.head)
        if isinstance(head, nn.Linear):
            started = time.perf_counter()
            setattr(model, self.family.head, self._swap(head, self.kind.for_head()))
            table = getattr(getattr(model, self.family.base), self.family.embed)
            if getattr(table, "weight", None) is not head.weight:
                _release(head)
            self.ms += (time.perf_counter() - started) * 1e3

    def tied(self, table_of: Any, head_of: Any) -> None:
        """The table of one model is the head of another (or the same), and both are on this node: keep no second copy.

        Only where float16 is smaller than what the table is in, and holds it.
        """
        head = getattr(head_of, self.family.head)
        base = getattr(table_of, self.family.base)
        table = getattr(base, self.family.embed)
        if (
            not isinstance(head, Swapped)
            or isinstance(head.product, PlainProduct)
            or not isinstance(table, nn.Embedding)
        ):
            return
        head.product.elements = 0  # they are the table's
        scale = getattr(table, "embed_scale", None)
        known = type(table) is nn.Embedding or isinstance(scale, torch.Tensor)
        if known and self.kind.halves and table.weight.dtype is torch.float32:
            setattr(base, self.family.embed, HalfTable(table.weight.detach(), scale, table.weight.dtype))

    def _swap(self, layer: nn.Module, kinds: Sequence[Kind] = ()) -> Swapped:
        weight, bias = matrix(layer)
        return Swapped(self._pack(weight, bias, kinds), weight.dtype)

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None, kinds: Sequence[Kind] = ()) -> Product:
        """By the first of these kinds, or by the engine's, that holds the matrix."""
        for kind in kinds or (self.kind,):
            if not (why := kind.misfit(weight)):
                break
        else:
            self.left.append(why)
            return PlainProduct(weight, bias)
        self.packed += 1
        if self.kind.halves:
            some = weight[::COUNTED_ROWS]
            self.numbers += some.numel()
            self.inexact += int((some.half().to(some.dtype) != some).sum())
        return kind.make(weight, bias)

    def _fuse(self, block: nn.Module, base: Any) -> nn.Module | None:
        """The block, fused; None, and no other will be, where what came out is not what the block computes."""
        try:
            # The first block is needed once more, to be compared with what came of it.
            made = FusedBlock(block, self._pack, _release if self._tried else _keep)
        except (AttributeError, IndexError):  # this release of transformers has other parts in it
            self.fused = False
            return None
        if not self._tried and not _agrees(block, made, base, self.kind.error):
            self.fused = False
            return None
        self._tried = True
        return made


def _keep(*_: nn.Module) -> None:
    pass


def _release(*modules: nn.Module) -> None:
    """Give the weights of what was packed back now, to the system too.

    Modules hang in circles and wait for the garbage collector; and the C library would keep what lies between pieces
    that stay.
    """
    for param in (param for module in modules for param in module.parameters()):
        param.data = torch.empty(0, dtype=param.dtype)
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


def rotaries(base: Any) -> dict[str | None, Rotary]:
    """What rotates the layers of a model: one, or one for each kind of layer; none where positions are learned."""
    module = getattr(base, "rotary_emb", None)
    if module is None:
        return {}
    like = torch.empty(0, dtype=torch.float32)
    kinds = getattr(module, "layer_types", None)
    return {kind: Rotary(module, kind, like) for kind in (kinds or (None,))}


@torch.inference_mode()
def _agrees(block: nn.Module, made: FusedBlock, base: Any, error: float) -> bool:
    """Whether both give the same for a few made-up rows, within what packing may change."""
    weight = next(block.parameters())
    hidden = int(made.before.weight.shape[0]) if made.before is not None else 0
    x = torch.arange(TRIAL_ROWS * hidden, dtype=torch.float32).mul(1.7).sin().mul(3).cos().view(TRIAL_ROWS, hidden)
    x = x.to(weight.dtype).float()
    positions = torch.arange(TRIAL_ROWS).unsqueeze(0)
    lowest = torch.finfo(weight.dtype).min
    mask = torch.full((TRIAL_ROWS, TRIAL_ROWS), lowest, dtype=torch.float32).triu_(1).to(weight.dtype)
    given: dict[str, Any] = {"attention_mask": mask[None, None], "position_ids": positions}
    turn = None
    if made.rotary:
        found = rotaries(base)
        kind = made.kind if made.kind in found else None
        turn = found[kind].rows(0, TRIAL_ROWS)
        more = () if kind is None else (kind,)
        given["position_embeddings"] = base.rotary_emb(x.to(weight.dtype), positions, *more)
    true = block(x.to(weight.dtype).unsqueeze(0), **given)
    true = (true[0] if isinstance(true, tuple) else true)[0].float()
    cache = SessionCache([made.index], [None])
    # Some rows at once, and one that sees them: what a prompt and what a token takes are not the same.
    turns = (None, None) if turn is None else tuple((turn[0][some], turn[1][some]) for some in _PARTS)
    ours = torch.cat(
        [
            made(x[some], [Rows(0, some.stop - some.start, cache)], part)
            for some, part in zip(_PARTS, turns, strict=True)
        ]
    )
    # What the block adds: its input would hide a wrong half.
    worst, scale = (ours - true).abs().max(), (true - x).abs().max()
    rounding = torch.finfo(weight.dtype).eps * true.abs().max()
    return bool(worst <= 8 * error * scale + 8 * rounding)
