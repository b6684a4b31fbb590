"""What lies in a checkpoint directory, and reading single tensors out of it.

Only file headers are read when an index is opened. A tensor is read with ``pread`` straight into memory that torch
aligned (64 bytes): no mapping of the file stays behind, so what is resident is exactly what was asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from splitlm.core.errors import CheckpointError, ModelMissingError
from splitlm.model.header import Entry, read_header, read_into

FINGERPRINT_BYTES = 4096
_COMPARE_BYTES = 1 << 20


class CheckpointIndex:
    """The tensors of a model directory by key. Opened once per process; holds no weights.

    Attributes:
        folder: the model directory.
        config: the content of its ``config.json``.
        entries: where each tensor lies.
        reads: the keys of all tensors read so far, in order (fingerprints read no tensor).

    Args:
        folder: directory with ``config.json`` and safetensors files.
        weights: False where only the config is wanted; then there are no entries.

    Raises:
        ModelMissingError: a file is not there.
        CheckpointError: a file is not safetensors, is truncated, or disagrees with the index or with another file.
    """

    def __init__(self, folder: Path, *, weights: bool = True) -> None:
        self.folder = folder
        self.config: dict[str, Any] = read_json(folder / "config.json")
        self.entries: dict[str, Entry] = {}
        self.reads: list[str] = []
        for path, keys in self._files() if weights else []:
            found = read_header(path)
            missing = sorted(keys - found.keys()) if keys is not None else []
            if missing:
                raise CheckpointError(
                    f"The tensor {missing[0]!r} is not in it", where=str(path), expected="what the index file promises"
                )
            twice = sorted(found.keys() & self.entries.keys())
            if twice:
                raise CheckpointError(
                    f"The tensor {twice[0]!r} lies in {self.entries[twice[0]].path.name} too",
                    where=str(path),
                    expected="every tensor in one file",
                    remedy="Copy or download the model again",
                )
            self.entries |= found

    def _files(self) -> list[tuple[Path, set[str] | None]]:
        """The safetensors files, with the keys that an index file promises for each."""
        listing = self.folder / "model.safetensors.index.json"
        single = self.folder / "model.safetensors"
        if single.is_file():
            return [(single, None)]
        if listing.is_file():
            weight_map = read_json(listing).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(
                    "There is no weight_map", where=str(listing), expected="a map from tensor to file"
                )
            by_file: dict[str, set[str]] = {}
            for key, name in weight_map.items():
                if not isinstance(name, str) or Path(name).name != name or not name:
                    raise CheckpointError(
                        f"The tensor {key!r} lies in {name!r}", where=str(listing), expected="a plain file name"
                    )
                by_file.setdefault(name, set()).add(key)
            return [(self.folder / name, keys) for name, keys in sorted(by_file.items())]
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

    def entry(self, key: str) -> Entry:
        """Where a tensor lies.

        Raises:
            CheckpointError: there is no such tensor.
        """
        found = self.entries.get(key)
        if found is None:
            raise CheckpointError(
                f"There is no tensor {key!r}",
                where=str(self.folder),
                expected="every tensor of the model that config.json describes",
            )
        return found

    def read(self, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor, in memory of its own, 64-byte aligned.

        Args:
            key: the tensor's name in the checkpoint.
            dtype: element type to return; None keeps the checkpoint's.

        Raises:
            CheckpointError: there is no such tensor, or its file ends early.
        """
        entry = self.entry(key)
        self.reads.append(key)
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        if tensor.numel():
            read_into(entry.path, entry.begin, tensor.view(-1).view(torch.uint8).numpy().data)
        return tensor if dtype is None or dtype == entry.dtype else tensor.to(dtype)

    def cached(self, key: str) -> bool | None:
        """Whether the end of a tensor is in the page cache, so that reading it needs no disk; None: not to be told."""
        entry = self.entry(key)
        if not hasattr(os, "RWF_NOWAIT") or entry.begin == entry.end:
            return None
        try:
            with entry.path.open("rb") as file:
                return os.preadv(file.fileno(), [bytearray(1)], entry.end - 1, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False
        except OSError:
            return None

    def same_content(self, one: str, other: str) -> bool:
        """Whether two tensors are equal byte for byte; read a MiB at a time, and kept nowhere."""
        a, b = self.entry(one), self.entry(other)
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        for at in range(0, a.end - a.begin, _COMPARE_BYTES):
            left = bytearray(min(_COMPARE_BYTES, a.end - a.begin - at))
            right = bytearray(len(left))
            read_into(a.path, a.begin + at, memoryview(left))
            read_into(b.path, b.begin + at, memoryview(right))
            if left != right:
                return False
        return True

    def fingerprint(self) -> str:
        """SHA-256 over every tensor's key, dtype and shape and its first 4 KiB, in the order of the keys.

        The same for one file and for many. Not the same for a copy with other keys or in another element type.
        """
        digest = hashlib.sha256()
        for key, entry in sorted(self.entries.items()):
            digest.update(f"{key}\0{entry.dtype}\0{entry.shape}\0".encode())
            head = bytearray(min(FINGERPRINT_BYTES, entry.end - entry.begin))
            read_into(entry.path, entry.begin, memoryview(head))
            digest.update(head)
        return digest.hexdigest()

    def config_hash(self) -> str:
        """See ``model.config.config_hash``: equal for copies of one model saved by different versions.

        Raises:
            CheckpointError: transformers cannot read the config.
        """
        from splitlm.model.config import hash_of_folder

        return hash_of_folder(self.folder)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ModelMissingError: the file is not there or cannot be read.
        CheckpointError: it is not a JSON object.
    """
    try:
        data = json.loads(path.read_bytes().decode())
    except OSError as error:
        raise ModelMissingError(
            f"The file cannot be read ({error.strerror})", where=str(path), expected="a model directory with this file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"The file is not JSON ({str(error)[:240]})", where=str(path), expected="a JSON object"
        ) from error
    if not isinstance(data, dict):
        raise CheckpointError("The file holds no JSON object", where=str(path), expected="a JSON object")
    return data
