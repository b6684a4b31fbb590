"""What one party needs to go on, as two files: tensors (safetensors), and everything else (JSON). No pickle."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from splitlm.core.errors import CheckpointError
from splitlm.finetune.diskfile import write, written
from splitlm.finetune.manifest import MANIFEST, File, measure, round_folder, verify
from splitlm.model.checkpoint import flush, save_tensors, unwritable

KEPT = 3
"""Rounds of a party that are kept: the two that are whole, and the one that is not yet."""

ROWS = "rows"
"""Of ``Party.extra``: the fingerprint of an owner's rows."""
_WEIGHTS, _OPTIMIZER, _RNG = "weights/", "optimizer/", "rng"


@dataclass(frozen=True)
class Party:
    """What one party needs to go on after a round.

    Attributes:
        tensors: by name; what it trains.
        optimizer: its state: dicts, lists, tuples, numbers, text, None, and tensors among them.
        rng: state of its random generators.
        cursor: where its data goes on.
        extra: further JSON values.
    """

    tensors: Mapping[str, Tensor]
    optimizer: object = None
    rng: bytes = b""
    cursor: Mapping[str, int] = field(default_factory=dict)
    extra: Mapping[str, object] = field(default_factory=dict)


class _Values(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cursor: dict[str, int]
    extra: dict[str, Any]
    optimizer: Any


def files_of(name: str) -> tuple[str, str]:
    """Names of a party's two files."""
    safe = f"party-{quote(name, safe='')}"
    return f"{safe}.safetensors", f"{safe}.json"


def save_party(folder: Path, name: str, party: Party) -> tuple[Path, Path]:
    """Write a party's files, each in one step.

    Raises:
        OSError: they cannot be written.
        TypeError: the optimizer's state holds something that is neither plain nor a tensor.
    """
    stored, said = (folder / file for file in files_of(name))
    moments: dict[str, Tensor] = {}
    values = _Values(dict(party.cursor), dict(party.extra), flatten(party.optimizer, moments))
    tensors = {_WEIGHTS + key: tensor for key, tensor in party.tensors.items()}
    tensors |= {_OPTIMIZER + key: tensor for key, tensor in moments.items()}
    tensors[_RNG] = torch.tensor(list(party.rng), dtype=torch.uint8)
    with written(stored) as temporary:
        save_tensors(temporary, tensors)
    write(said, msgspec.json.encode(values))
    return stored, said


def held(run: Path, role: str, mark: str) -> dict[str, list[int]]:
    """Of whom and of which rounds files lie in a folder: what a party of this role can go on from.

    Args:
        run: the folder.
        role: of the parties that are looked for.
        mark: of the party's rows. Whose files were stored with the same mark are named alone, if there are any: two
            owners on one machine may share a folder.
    """
    found: dict[str, list[int]] = {}
    mine: set[str] = set()
    for path in sorted(run.glob(f"rounds/*/party-{role}-*.json")):
        name = unquote(path.stem.removeprefix("party-"))
        if not path.parent.name.isdecimal():
            continue
        found.setdefault(name, []).append(int(path.parent.name))
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            if msgspec.json.decode(path.read_bytes(), type=_Values).extra.get(ROWS, "") == mark:
                mine.add(name)
    return {name: rounds for name, rounds in found.items() if name in mine or not mine}


def load_party(folder: Path, name: str) -> Party:
    """Read a party's files; tensors in memory of their own, on the CPU.

    Raises:
        CheckpointError: they are damaged.
    """
    stored, said = (folder / file for file in files_of(name))
    try:
        # Copies: memory of a mapped file is aligned otherwise, which gives other sums.
        tensors = {key: tensor.clone() for key, tensor in load_file(stored).items()}
        values = msgspec.json.decode(said.read_bytes(), type=_Values)
        moments = {key.removeprefix(_OPTIMIZER): t for key, t in tensors.items() if key.startswith(_OPTIMIZER)}
        return Party(
            tensors={key.removeprefix(_WEIGHTS): t for key, t in tensors.items() if key.startswith(_WEIGHTS)},
            optimizer=nest(values.optimizer, moments),
            rng=bytes(tensors[_RNG].tolist()),
            cursor=values.cursor,
            extra=values.extra,
        )
    except (OSError, SafetensorError, msgspec.MsgspecError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"It cannot be read ({type(error).__name__}: {error})",
            where=str(stored),
            expected="the files that were written",
        ) from error


class PartyFolder:
    """Where one party keeps its rounds; which of them are whole, the run's manifest says.

    Args:
        path: of the run, or of this machine's part of it.
        name: of the party.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name

    def save(self, round: int, party: Party) -> dict[str, File]:
        """Write a round, then remove this party's older ones but for those that a manifest may name.

        Raises:
            SplitlmError: it cannot be written; earlier rounds are as they were.
        """
        folder = round_folder(self._path, round)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            paths = save_party(folder, self._name, party)
            flush(folder.parent)
            found = {path.name: measure(path) for path in paths}
        except OSError as error:
            for name in files_of(self._name):  # without its manifest it is of no use, and the room may be wanted
                with contextlib.suppress(OSError):
                    (folder / name).unlink(missing_ok=True)
            raise unwritable(folder, error) from error
        self._forget(round - KEPT)
        return found

    def load(self, round: int, files: Mapping[str, File], name: str = "") -> Party:
        """What was written in a round.

        Args:
            files: as the manifest has them.
            name: of the party whose state it is; by default this one.

        Raises:
            CheckpointError: it is not there, or not as it was written.
        """
        folder, name = round_folder(self._path, round), name or self._name
        for file in files_of(name):
            verify(folder, files, file)
        return load_party(folder, name)

    def _forget(self, last: int) -> None:
        mine = files_of(self._name)
        for folder in self._path.glob("rounds/*"):
            if folder.name.isdecimal() and int(folder.name) <= last and not (folder / MANIFEST).exists():
                with contextlib.suppress(OSError):
                    for file in mine:
                        (folder / file).unlink(missing_ok=True)
                    folder.rmdir()  # unless another party's are in it


def flatten(value: object, tensors: dict[str, Tensor], at: str = "state") -> object:
    """A nested value as JSON can hold it; its tensors are put into ``tensors``, under their place in the value.

    What JSON has no word for becomes an object of one key: ``$tensor``, ``$tuple``, ``$dict`` (keys that are not text,
    or that begin with ``$``) and ``$float`` (not finite).

    Raises:
        TypeError: something that is neither plain nor a tensor.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"$float": repr(value)}
        case Tensor():
            tensors[at] = value
            return {"$tensor": at}
        case list():
            return [flatten(inner, tensors, f"{at}.{i}") for i, inner in enumerate(value)]
        case tuple():
            return {"$tuple": flatten(list(value), tensors, at)}
        case dict() if all(isinstance(key, str) and not key.startswith("$") for key in value):
            # Numbered as well: keys may hold the dots that join them.
            return {key: flatten(inner, tensors, f"{at}.{i}:{key}") for i, (key, inner) in enumerate(value.items())}
        case dict():
            return {"$dict": flatten([[key, inner] for key, inner in value.items()], tensors, at)}
        case _:
            raise TypeError(f"{at} is a {type(value).__name__}, which is neither plain nor a tensor")


def nest(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The nested value that ``flatten`` took apart.

    Raises:
        LookupError, TypeError, ValueError: it is not what ``flatten`` made.
    """
    if isinstance(value, list):
        return [nest(inner, tensors) for inner in value]
    if not isinstance(value, dict):
        return value
    match next(iter(value.items()), None):
        case ("$tensor", str() as name):
            return tensors[name]
        case ("$tuple", list() as items):
            return tuple(nest(items, tensors))
        case ("$float", str() as text):
            return float(text)
        case ("$dict", list() as pairs):
            return {nest(key, tensors): nest(inner, tensors) for key, inner in pairs}
        case _:
            return {key: nest(inner, tensors) for key, inner in value.items()}
