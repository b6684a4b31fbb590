"""Linear layers with packed weights: what an engine puts in place of torch's and transformers' own.

Each kind packs one matrix of ``[out, in]``, and says which matrices it cannot hold. What packs and multiplies is in
torch, or our own (``native``); whether this build and this processor have it is tried, not looked up (``Kind.trial``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from splitlm.model.compute.native.library import prepare
from splitlm.model.compute.native.product import BlockProduct, finite
from splitlm.model.compute.packed import Product as Product

HALF_MAX = 65504.0
"""Largest number of float16."""
HALF_BLOCK = 512
"""FBGEMM lays out so many inputs at a time, and holds zeros for those that are not there: 576 take the room of 1024."""
GROUP = 32
"""Weights that share one scale and zero point in int4."""
PACKED_ROWS = 1024
"""Rows that are rounded to 4 bits at once: the kernel keeps them in groups of 64, one after the other."""
_TRIED = (64, 96)
"""Shape of the matrix that is packed to find out whether a kind works here."""


class PlainProduct(Product):
    """In float32, as it was: for a matrix that cannot be packed."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.float().contiguous(), False)
        self.bias = None if bias is None else nn.Parameter(bias.float(), False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Product``."""
        return functional.linear(x, self.weight, self.bias)


class HalfProduct(Product):
    """Weights in float16; activations and sums in float32 (FBGEMM). A row does not depend on those beside it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.packed: Any = torch.ops.quantized.linear_prepack_fp16(
            weight.float(), None if bias is None else bias.float()
        )
        self.elements = _elements(weight, bias)
        rows, columns = weight.shape
        self.nbytes = rows * -(-columns // HALF_BLOCK) * HALF_BLOCK * 2 + (0 if bias is None else bias.numel() * 4)
        self._product = torch.ops.quantized.linear_dynamic_fp16.default

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Product``."""
        out: torch.Tensor = self._product(x, self.packed)
        return out

    def release(self) -> None:
        """See ``Product``."""
        super().release()
        self.packed = None


class ByteProduct(Product):
    """Weights in int8, a scale for each output; activations are rounded to 8 bits at each call (FBGEMM).

    All rows of a call share one scale of activations, so a row depends on those beside it.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        weight = weight.float()
        low, high = torch.aminmax(weight, dim=1)
        scales = torch.maximum(-low, high).clamp_min(1e-8) / 127
        zeros = torch.zeros(len(scales), dtype=torch.long)
        rounded = torch.quantize_per_channel(weight, scales.double(), zeros, 0, torch.qint8)
        self.packed: Any = torch.ops.quantized.linear_prepack(rounded, None if bias is None else bias.float())
        self.elements = _elements(weight, bias)
        self.nbytes = weight.numel() + 4 * len(scales) * (1 if bias is None else 2)
        self._product = torch.ops.quantized.linear_dynamic.default

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Product``."""
        out: torch.Tensor = self._product(x, self.packed, False)
        return out

    def release(self) -> None:
        """See ``Product``."""
        super().release()
        self.packed = None


class NibbleProduct(Product):
    """Weights in 4 bits, a scale and a zero point for each group of 32; activations in bfloat16 (torch's kernel)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        weight = weight.float()
        parts = [_nibbles(rows) for rows in torch.split(weight, PACKED_ROWS)]
        self.packed: Any = torch.cat([packed for packed, _ in parts])
        self.scales: Any = torch.cat([scales for _, scales in parts], 1)
        self.bias = None if bias is None else nn.Parameter(bias.float(), False)
        self.elements = weight.numel()  # the bias is a parameter
        self.nbytes = weight.numel() // 2 + self.scales.nbytes
        self._product = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Product``."""
        out: torch.Tensor = self._product(x.bfloat16(), self.packed, GROUP, self.scales).float()
        return out if self.bias is None else out.add_(self.bias)

    def release(self) -> None:
        """See ``Product``."""
        super().release()
        self.packed = self.scales = None


def _nibbles(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Some rows of a matrix, rounded to 4 bits and packed, and their scales and zero points ``[groups, rows, 2]``."""
    rows, columns = weight.shape
    groups = weight.view(rows, columns // GROUP, GROUP)
    low, high = torch.aminmax(groups, dim=-1)
    scale = ((high - low) / 15).clamp_min(1e-8)
    values = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 15).to(torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.view(rows, columns), 1)
    return packed, torch.stack([scale, low + scale * 8], -1).transpose(0, 1).contiguous().bfloat16()


def products(module: nn.Module) -> list[Product]:
    """All that are in a module."""
    return [part for part in module.modules() if isinstance(part, Product)]


def _elements(weight: torch.Tensor, bias: torch.Tensor | None) -> int:
    return weight.numel() + (0 if bias is None else bias.numel())


def _half_fits(weight: torch.Tensor) -> str:
    low, high = torch.aminmax(weight)  # without a copy: a head is large
    largest = max(-float(low), float(high))
    return "" if largest <= HALF_MAX else f"it holds {largest:g}, beyond float16"


def _any_fits(_: torch.Tensor) -> str:
    return ""


def _nibble_fits(weight: torch.Tensor) -> str:
    rows, columns = weight.shape
    return "" if columns % GROUP == 0 and rows % 16 == 0 else f"its shape is {rows} x {columns}"


def _nothing() -> str:
    return ""


@dataclass(frozen=True)
class Trial:
    """What a machine can do.

    Attributes:
        kind: that works here; None where none does.
        why: the ones before it do not.
    """

    kind: Kind | None
    why: str = ""


@dataclass(frozen=True)
class Kind:
    """One way to pack.

    Attributes:
        name: of the engine that packs so, and of what multiplies where there are several.
        make: packs a matrix ``[out, in]`` and its bias; compiles nothing.
        misfit: why a matrix cannot be packed; "" for one that can.
        width: how many sessions may share a product without changing each other's numbers.
        halves: whether weights are held in float16.
        error: what the result may differ by, as a share of its largest number: a bound for sanity, not a promise.
        prepare: done before the first matrix is packed, once on a machine it may take seconds; why it fails, or "".
        instead: what the engine packs with where this kind does not work.
        head: what the output head is packed with where that works and holds it; None for this kind. An error in a
            logit is not averaged out by any later layer.
    """

    name: str
    make: Callable[[torch.Tensor, torch.Tensor | None], Product]
    misfit: Callable[[torch.Tensor], str]
    width: int
    error: float
    halves: bool = False
    prepare: Callable[[], str] = _nothing
    instead: Kind | None = None
    head: Kind | None = None

    def trial(self) -> Trial:
        """Which works here, this kind or what stands in for it. Packs and multiplies a small matrix to find out."""
        why = self.prepare() or self._wrong()
        if not why:
            return Trial(self)
        if self.instead is None:
            return Trial(None, why)
        other = self.instead.trial()
        return Trial(other.kind, why if not other.why else f"{why}; {other.why}")

    def for_head(self) -> tuple[Kind, ...]:
        """What works here for the output head: the first that it fits."""
        return (self.head, self) if self.head is not None and self.head.trial().kind is self.head else (self,)

    def missing(self) -> str:
        """Why this machine can run neither this kind nor another in its stead; "" where it can."""
        found = self.trial()
        return "" if found.kind is not None else found.why

    def _wrong(self) -> str:
        weight = torch.linspace(-1, 1, _TRIED[0] * _TRIED[1], dtype=torch.float32).view(_TRIED).sin()
        rows = torch.linspace(-2, 2, 3 * _TRIED[1], dtype=torch.float32).view(3, _TRIED[1]).cos()
        true = functional.linear(rows, weight)
        try:
            with torch.inference_mode():
                found = self.make(weight, None)(rows)
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            return " ".join(str(error).split())[:160] or type(error).__name__
        worst = float((found - true).abs().max() / true.abs().max())
        return "" if worst <= self.error else f"its results are wrong by {worst:.1%}"


_HALVES = Kind("fast", HalfProduct, _half_fits, 32, 2e-3, halves=True)
_BYTES = Kind("int8 (torch)", ByteProduct, _any_fits, 1, 5e-2, head=_HALVES)
KINDS = {
    "fast": _HALVES,
    "int8": Kind("int8 (native)", BlockProduct, finite, 32, 2e-2, prepare=prepare, instead=_BYTES, head=_HALVES),
    "int4": Kind("int4", NibbleProduct, _nibble_fits, 1, 2e-1, head=_HALVES),
}
"""By the engine that packs so."""
