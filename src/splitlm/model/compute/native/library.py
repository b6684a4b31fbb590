"""The compiled products as Python calls them: through ctypes, which lets other threads run meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from pathlib import Path

import torch

from splitlm.core.errors import UsageError
from splitlm.model.compute.native.build import build, find, folder, forget_failures

TILE = 16
"""Rows of weights that are stored together: parts of a matrix are packed from a multiple of it on."""
PACKED_ROWS = 64 * TILE
"""Packed at a time, so that only as many are in memory as float32 as well."""


class Library:
    """One compiled library.

    Attributes:
        path: where it lies.
        level: the instructions that it uses.
        threaded: whether it uses more than one thread.

    Raises:
        UsageError: the file is no such library.
    """

    def __init__(self, path: Path) -> None:
        size, pointer = ctypes.c_int64, ctypes.c_void_p
        self.path = path
        try:
            library = ctypes.CDLL(str(path))
            library.splitlm_level.restype = ctypes.c_char_p
            library.splitlm_bytes.argtypes, library.splitlm_bytes.restype = [size, size], size
            library.splitlm_pack.argtypes, library.splitlm_pack.restype = [pointer, size, size, pointer], None
            library.splitlm_product.argtypes = [pointer, size, size, pointer, pointer, size, pointer, size]
            self.level = library.splitlm_level().decode()
            self.threaded = bool(library.splitlm_threaded())
        except (OSError, AttributeError) as error:
            raise UsageError(f"it cannot be loaded ({error})", where=str(path), remedy="Remove it") from error
        self._bytes, self._pack, self._product = (
            library.splitlm_bytes,
            library.splitlm_pack,
            library.splitlm_product,
        )

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """A matrix ``[out, in]`` of any element type as bytes that ``product`` takes."""
        outputs, columns = weight.shape
        packed = torch.empty(self._bytes(outputs, columns), dtype=torch.uint8)
        for first in range(0, outputs, PACKED_ROWS):
            rows = weight[first : first + PACKED_ROWS].float().contiguous()
            place = packed.data_ptr() + self._bytes(first, columns)
            self._pack(rows.data_ptr(), len(rows), columns, place)
        return packed

    def product(
        self, x: torch.Tensor, packed: torch.Tensor, outputs: int, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``[rows, out]`` of ``x`` ``[rows, in]`` and ``outputs`` packed rows of weights, on torch's number of threads.

        Raises:
            RuntimeError: the shapes or element types do not fit: our own caller's mistake.
            MemoryError: there is none for the quantised activations.
        """
        rows, columns = x.shape
        if x.dtype != torch.float32 or packed.numel() != self._bytes(outputs, columns):
            raise RuntimeError(f"a packed matrix of {outputs} rows was called with {list(x.shape)} {x.dtype}")
        if bias is not None and (bias.dtype != torch.float32 or bias.shape != (outputs,) or not bias.is_contiguous()):
            raise RuntimeError(f"a bias of {list(bias.shape)} {bias.dtype} for {outputs} rows")
        x = x.contiguous()
        out = torch.empty(rows, outputs, dtype=torch.float32)
        failed = self._product(
            x.data_ptr(),
            rows,
            columns,
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            outputs,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"the activations of {rows} rows")
        return out


@functools.cache
def library() -> Library:
    """The library of this machine, which was built before: no compiler is ever started here.

    Raises:
        UsageError: it was not, or cannot be loaded.
    """
    path = find(folder())
    if path is None:
        raise UsageError("they were not built", where="the native products", remedy="Choose the engine int8 first")
    return Library(path)


@functools.cache
def prepare() -> str:
    """Build and load the library, if this is possible; why it is not, else "". Tried once in a process."""
    try:
        path = build(folder())
        try:
            library()
        except UsageError:  # built against what is here no more: a home may be shared, a system renewed
            path.unlink(missing_ok=True)
            build(folder())
            library()
    except UsageError as error:
        return str(error)
    return ""


def forget() -> None:
    """A build that failed in another process is to be tried anew by whoever needs it next."""
    with contextlib.suppress(UsageError):
        forget_failures(folder())
