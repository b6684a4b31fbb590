"""What lies in a checkpoint directory, and reading single tensors out of it.

Only file headers are read when an index is opened. A tensor is read with ``pread`` straight into memory that torch
aligned (64 bytes): no mapping of the file stays behind, so what is resident is exactly what was asked for.
"""

from __future__ import annotations

import hashlib
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
FINGERPRINT_BYTES = 4096


class Entry(msgspec.Struct, frozen=True):
    """Where one tensor lies: its file, absolute byte range, element type and shape."""

    path: Path
    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class CheckpointIndex:
    """The tensors of a model directory by key. Opened once per process; holds no weights.

    Args:
        folder: directory with ``config.json`` and safetensors files.

    Raises:
        ModelMissingError: a file is not there.
        CheckpointError: a file is not safetensors, is truncated, or disagrees with the index.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: dict[str, Any] = read_json(folder / "config.json")
        self.entries: dict[str, Entry] = {}
        self.reads: list[str] = []
        for path, keys in self._files():
            found = read_header(path)
            missing = sorted(keys - found.keys()) if keys is not None else []
            if missing:
                raise CheckpointError(
                    f"The tensor {missing[0]!r} is not in it", where=str(path), expected="what the index file promises"
                )
            self.entries |= found

    def _files(self) -> list[tuple[Path, set[str] | None]]:
        """The safetensors files, with the keys that an index file promises for each."""
        listing = self.folder / "model.safetensors.index.json"
        single = self.folder / "model.safetensors"
        if listing.is_file() and not single.is_file():
            weight_map = read_json(listing).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(
                    "There is no weight_map", where=str(listing), expected="a map from tensor to file"
                )
            by_file: dict[str, set[str]] = {}
            for key, name in weight_map.items():
                if not isinstance(name, str) or Path(name).name != name:
                    raise CheckpointError(f"{key!r} lies in {name!r}", where=str(listing), expected="a plain file name")
                by_file.setdefault(name, set()).add(key)
            return [(self.folder / name, keys) for name, keys in sorted(by_file.items())]
        if single.is_file():
            return [(single, None)]
        others = sorted(self.folder.glob("*.safetensors"))
        if len(others) == 1:
            return [(others[0], None)]
        raise ModelMissingError(
            "There is no model.safetensors and no model.safetensors.index.json",
            where=str(self.folder),
            expected="a model directory with safetensors weights",
            remedy="Save the model with safetensors (save_pretrained does by default)",
        )

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def read(self, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor, in memory of its own, 64-byte aligned.

        Args:
            key: the tensor's name in the checkpoint.
            dtype: element type to return; None keeps the checkpoint's.

        Raises:
            CheckpointError: there is no such tensor, or its file ends early.
        """
        entry = self.entries.get(key)
        if entry is None:
            raise CheckpointError(
                f"There is no tensor {key!r}", where=str(self.folder), expected="every tensor of the model"
            )
        self.reads.append(key)
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        if tensor.numel():
            read_into(entry.path, entry.begin, tensor.view(-1).view(torch.uint8).numpy().data)
        return tensor if dtype is None or dtype == entry.dtype else tensor.to(dtype)

    def fingerprint(self) -> str:
        """SHA-256 over every tensor's key, dtype and shape and its first 4 KiB, in the order of the keys."""
        digest = hashlib.sha256()
        for key, entry in sorted(self.entries.items()):
            digest.update(f"{key}\0{entry.dtype}\0{entry.shape}\0".encode())
            head = bytearray(min(FINGERPRINT_BYTES, entry.end - entry.begin))
            read_into(entry.path, entry.begin, memoryview(head))
            digest.update(head)
        return digest.hexdigest()

    def config_hash(self) -> str:
        """SHA-256 over the config, without the fields that do not change the model."""
        idle = {"_name_or_path", "_model_name_or_path", "transformers_version", "_from_model_config"}
        kept = {key: value for key, value in self.config.items() if key not in idle}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ModelMissingError: the file is not there or cannot be read.
        CheckpointError: it is not a JSON object.
    """
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelMissingError(
            f"The file cannot be read ({error.strerror})", where=str(path), expected="a model directory with this file"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"The file is not JSON ({error})", where=str(path), expected="a JSON object") from error
    if not isinstance(data, dict):
        raise CheckpointError("The file holds no JSON object", where=str(path), expected="a JSON object")
    return data


def read_into(path: Path, offset: int, target: memoryview) -> None:
    """Fill ``target`` with the bytes of a file from ``offset`` on."""
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
        raise CheckpointError(f"The file cannot be read ({error.strerror})", where=str(path)) from error


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors that one safetensors file declares, checked against its size.

    Format: https://huggingface.co/docs/safetensors — eight bytes of header length, a JSON header, the tensors.

    Raises:
        ModelMissingError: the file is not there.
        CheckpointError: it is not safetensors, or is truncated.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ModelMissingError(
            f"The file cannot be read ({error.strerror})",
            where=str(path),
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
        raise _damaged(path, f"The file has {size} bytes and a header of {length}")
    raw = bytearray(length)
    read_into(path, 8, memoryview(raw))
    try:
        header = json.loads(raw)
        items = {key: value for key, value in header.items() if key != "__metadata__"}
        entries = {key: _entry(path, 8 + length, value) for key, value in items.items()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise _damaged(path, f"The file's header cannot be read ({error})") from error
    end = max((entry.end for entry in entries.values()), default=8 + length)
    if end > size:
        raise CheckpointError(
            f"The file is truncated: it has {size} bytes",
            where=str(path),
            expected=f"{end} bytes",
            remedy="Copy or download it again",
        )
    return entries


def _entry(path: Path, base: int, value: dict[str, Any]) -> Entry:
    begin, end = (int(x) for x in value["data_offsets"])
    shape = tuple(int(x) for x in value["shape"])
    dtype = _DTYPES.get(value["dtype"])
    if dtype is None:
        raise ValueError(f"element type {value['dtype']} is not supported")
    if not 0 <= begin <= end or any(side < 0 for side in shape) or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"bytes {begin} to {end} do not hold {dtype} {shape}")
    return Entry(path, base + begin, base + end, dtype, shape)


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(what, where=str(path), expected="a safetensors file", remedy="Copy or download it again")
