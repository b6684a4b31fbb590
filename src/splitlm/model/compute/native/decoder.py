"""The compiled steps between a block's products, as Python calls them: norms, attention of one row, activations."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

from splitlm.core.errors import UsageError
from splitlm.model.compute.native.library import library, prepare

ACTS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    functional.silu,
    functools.partial(functional.gelu, approximate="tanh"),
)
"""Activations that are compiled, by their number there."""
_ACT_ERROR = 1e-6


class Heads(ctypes.Structure):
    """Of a block's attention; the same in decode.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "width")),
        *((name, ctypes.c_void_p) for name in ("query_norm", "key_norm")),
        *((name, ctypes.c_float) for name in ("query_least", "key_least", "scale")),
    )


class Decoder:
    """The compiled steps of one library. All tensors are float32 and contiguous.

    Raises:
        UsageError: the file is no such library.
    """

    def __init__(self, path: Path) -> None:
        size, pointer, real = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
        try:
            library = ctypes.CDLL(str(path))
            self._norm, self._activate = library.splitlm_norm, library.splitlm_activate
            self._attend = library.splitlm_attend
        except (OSError, AttributeError) as error:
            raise UsageError(f"it cannot be loaded ({error})", where=str(path), remedy="Remove it") from error
        self._norm.argtypes, self._norm.restype = [pointer, size, size, pointer, real, pointer], None
        self._activate.argtypes, self._activate.restype = [pointer, size, size, size, size, pointer], None
        self._attend.argtypes = [pointer, *[pointer] * 5, size, pointer, size]

    def norm(self, x: torch.Tensor, weight: torch.Tensor, least: float) -> torch.Tensor:
        """Each row of ``[n, columns]``, divided by ``√(‖row‖² + least)``, times the weight ``[columns]``."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._norm(x.data_ptr(), x.shape[0], x.shape[1], weight.data_ptr(), least, out.data_ptr())
        return out

    def activate(self, x: torch.Tensor, act: int, gated: bool) -> torch.Tensor:
        """An activation of ``ACTS`` of ``[n, columns]``; gated, of the first half of each row, times the second."""
        rows, columns = x.shape
        columns = columns // 2 if gated else columns
        x = x.contiguous()
        out = torch.empty(rows, columns, dtype=torch.float32)
        self._activate(x.data_ptr(), rows, columns, act, gated, out.data_ptr())
        return out

    def attend(self, heads: int, row: int, turn: tuple[int, int], keys: int, values: int, rows: int, out: int) -> None:
        """Attention of one row; its keys and values are written behind those that were there. Addresses, all of them.

        Args:
            heads: a ``Heads``.
            row: query, key and value heads, before norms and rotation.
            turn: of cosines and sines of the row's position, ``[width]`` each; zeros for no rotation.
            keys: ``[rows, kv_heads, width]``, what the row sees; the last is its own, and free.
            values: the same of values.
            out: ``[heads, width]``.

        Raises:
            MemoryError: there is none for the scores.
        """
        if self._attend(heads, row, *turn, keys, values, rows, out, torch.get_num_threads()):
            raise MemoryError(f"the scores of {rows} rows")


@functools.cache
def decoder() -> Decoder | None:
    """The compiled steps of this machine, built if they are not; None where they cannot be."""
    return None if prepare() else Decoder(library().path)


def act_of(act: Callable[[torch.Tensor], torch.Tensor]) -> int | None:
    """Which of ``ACTS`` a module computes, by what it gives; None for another."""
    some = torch.linspace(-12, 12, 97, dtype=torch.float32)
    found = act(some.clone())
    for number, known in enumerate(ACTS):
        if torch.allclose(found, known(some), rtol=_ACT_ERROR, atol=_ACT_ERROR):
            return number
    return None
