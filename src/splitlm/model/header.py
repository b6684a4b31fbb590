"""The header of a safetensors file: which tensors lie where. Nothing of it is believed before it is checked.

Format: https://huggingface.co/docs/safetensors — eight bytes of header length, a JSON header, the tensors without gaps.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import msgspec
import torch

from splitlm.core.errors import CheckpointError, ModelMissingError

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
_DTYPES |= {"BOOL": torch.bool}
MAX_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library itself."""


class Entry(msgspec.Struct, frozen=True):
    """Where one tensor lies: its file, absolute byte range, element type and shape."""

    path: Path
    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors that one safetensors file declares, checked against each other and against the file's size.

    Raises:
        ModelMissingError: the file is not there.
        CheckpointError: it is not safetensors, is truncated, or its tensors overlap or leave gaps.
    """
    try:
        size = path.stat().st_size
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise ModelMissingError(
            f"The file cannot be read ({getattr(error, 'strerror', None) or error})",
            where=repr(str(path)) if isinstance(error, ValueError) else str(path),
            expected="every file that the index names",
            remedy="Copy or download the model again",
        ) from error
    if size < 8:
        raise _damaged(path, f"The file has {size} bytes")
    raw = bytearray(8)
    read_into(path, 0, memoryview(raw))
    length = int.from_bytes(raw, "little")
    if length > MAX_HEADER:
        raise _damaged(path, f"The file is not safetensors: it would have a header of {length} bytes")
    if 8 + length > size:
        raise _damaged(path, f"The file is truncated: it has {size} bytes and a header of {length}")
    raw = bytearray(length)
    read_into(path, 8, memoryview(raw))
    try:
        header = json.loads(raw.decode(), object_pairs_hook=_once)
        if not isinstance(header, dict):
            raise ValueError("it is no JSON object")
        items = {key: value for key, value in header.items() if key != "__metadata__"}
        entries = {key: _entry(path, 8 + length, key, value) for key, value in items.items()}
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"The file's header cannot be read ({_short(error)})") from error
    at, before = 8 + length, "the header"
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            how = "overlap" if entry.begin < at else "leave a gap"
            raise _damaged(path, f"The tensor {key!r} and {before} {how} (byte {entry.begin}, {at} expected)")
        at, before = entry.end, repr(key)
    if at != size:
        raise CheckpointError(
            f"The file is truncated: it has {size} bytes" if at > size else f"The file has {size - at} bytes too many",
            where=str(path),
            expected=f"{at} bytes",
            remedy="Copy or download it again",
        )
    return entries


def read_into(path: Path, offset: int, target: memoryview) -> None:
    """Fill ``target`` with the bytes of a file from ``offset`` on.

    Raises:
        CheckpointError: the file cannot be read, or ends early.
    """
    try:
        with path.open("rb", buffering=0) as file:
            done = 0
            while done < target.nbytes:
                n = os.preadv(file.fileno(), [target[done:]], offset + done)
                if n == 0:
                    raise CheckpointError(
                        f"The file ends at byte {offset + done}",
                        where=str(path),
                        expected=f"{target.nbytes} bytes from byte {offset}",
                        remedy="Copy or download it again",
                    )
                done += n
    except OSError as error:
        raise CheckpointError(
            f"The file cannot be read ({error.strerror})", where=str(path), expected="a readable safetensors file"
        ) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are distinct and can be written as UTF-8."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        key.encode()
        if key in made:
            raise ValueError(f"{key!r} occurs twice")
        made[key] = value
    return made


def _entry(path: Path, base: int, key: str, value: object) -> Entry:
    fields = value if isinstance(value, dict) else {}
    offsets, shape = fields.get("data_offsets"), fields.get("shape")
    numbers = [*offsets, *shape] if isinstance(offsets, list) and isinstance(shape, list) else []
    if not numbers or len(offsets or ()) != 2 or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
        raise ValueError(f"{key!r} has shape {shape} and offsets {offsets}")
    dtype = _DTYPES.get(str(fields.get("dtype")))
    if dtype is None:
        raise ValueError(f"{key!r} has the element type {fields.get('dtype')}, which is not supported")
    begin, end, *sides = numbers
    if end - begin != math.prod(sides) * dtype.itemsize:
        raise ValueError(f"bytes {begin} to {end} do not hold {key!r} of {dtype} {sides}")
    return Entry(path, base + begin, base + end, dtype, tuple(sides))


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(what, where=str(path), expected="a safetensors file", remedy="Copy or download it again")


def _short(error: BaseException) -> str:
    text = str(error)
    return text if len(text) < 240 else text[:240] + "…"
