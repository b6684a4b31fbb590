"""What a linear layer with packed weights offers to the block that it is in."""

from __future__ import annotations

from torch import nn


class Product(nn.Module):
    """``x @ weight.T + bias`` for x ``[rows, in]`` in float32; the result is float32 ``[rows, out]``."""

    nbytes = 0
    """Of the packed weights."""
    elements = 0
    """Numbers in them, bias included."""

    def release(self) -> None:
        """Give the packed weights back at once; it cannot be called any more."""
        self.nbytes = 0
