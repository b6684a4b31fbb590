"""What every frame's header has: the element type and shape of each tensor that follows it."""

from __future__ import annotations

from math import prod
from typing import Literal

import msgspec

DType = Literal["float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"]
ITEM_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "bool": 1,
}


class Spec(msgspec.Struct, frozen=True, array_like=True):
    """Element type and shape of one tensor; its bytes are in C order."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, without padding."""
        return prod(self.shape, start=ITEM_BYTES[self.dtype])


class Header(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Base of all frame headers; ``tensors`` describes the payload."""

    tensors: tuple[Spec, ...] = ()
