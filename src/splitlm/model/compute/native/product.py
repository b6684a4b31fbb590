"""A linear layer with 8-bit weights in blocks of 16, multiplied by the compiled products."""

from __future__ import annotations

import torch
from torch import nn

from splitlm.model.compute.native.library import library
from splitlm.model.compute.packed import Product


class BlockProduct(Product):
    """Weights and activations in int8, each block of 16 of a row with a scale of its own; float32 sums.

    A row does not depend on those beside it, to the bit. A row with a number that is not finite gives only such.

    Raises:
        UsageError: the products were not built, see ``library``.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._library = library()
        self.outputs = weight.shape[0]
        self.packed: torch.Tensor | None = self._library.pack(weight)
        self.bias = None if bias is None else nn.Parameter(bias.float().contiguous(), False)
        self.elements = weight.numel()  # the bias is a parameter
        self.nbytes = self.packed.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Product``."""
        if self.packed is None:
            raise RuntimeError("a product was called after its weights were given back")
        return self._library.product(x, self.packed, self.outputs, self.bias)

    def release(self) -> None:
        """See ``Product``."""
        super().release()
        self.packed = None


def finite(weight: torch.Tensor) -> str:
    """Why a matrix cannot be packed; "" for one that can."""
    low, high = torch.aminmax(weight)  # of which any NaN makes two, and without a copy: a head is large
    return "" if bool(low.isfinite() and high.isfinite()) else "it holds a number that is not finite"
