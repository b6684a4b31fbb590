"""Tensors to frame buffers and back, without a copy where memory allows it."""

from __future__ import annotations

from typing import cast, get_args

import torch

from splitlm.core.errors import ProtocolError
from splitlm.wire.frame import DType, Spec

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in get_args(DType)}
_NAMES: dict[torch.dtype, DType] = {dtype: cast(DType, name) for name, dtype in _DTYPES.items()}


def dump(tensor: torch.Tensor) -> tuple[Spec, memoryview]:
    """The spec and the bytes of a tensor; the view shares memory with it when it is contiguous and on the CPU.

    Raises:
        ProtocolError: frames cannot carry its element type.
    """
    flat = tensor.detach().to("cpu").contiguous()
    return Spec(dtype_name(tensor.dtype), tuple(tensor.shape)), flat.view(-1).view(torch.uint8).numpy().data


def load(spec: Spec, data: memoryview) -> torch.Tensor:
    """A tensor that shares memory with a frame's buffer: valid until the frame is released.

    A buffer that must not be written to is copied, since torch knows no read-only tensors.

    Raises:
        ProtocolError: the bytes are not as many as the spec says.
    """
    if data.nbytes != spec.nbytes:
        raise ProtocolError(f"A tensor of {data.nbytes} bytes came", expected=f"{spec.nbytes} bytes for {spec}")
    if spec.nbytes == 0:
        return torch.empty(spec.shape, dtype=_DTYPES[spec.dtype])
    own = bytearray(data) if data.readonly or not data.c_contiguous else data
    return torch.frombuffer(own, dtype=_DTYPES[spec.dtype]).view(spec.shape)


def empty(spec: Spec) -> torch.Tensor:
    """A tensor of this shape and element type, without values."""
    return torch.empty(spec.shape, dtype=_DTYPES[spec.dtype])


def dtype_name(dtype: torch.dtype) -> DType:
    """The wire's name of an element type.

    Raises:
        ProtocolError: frames cannot carry it.
    """
    if dtype not in _NAMES:
        raise ProtocolError(f"Frames cannot carry {dtype}", expected=f"one of {', '.join(_DTYPES)}")
    return _NAMES[dtype]
