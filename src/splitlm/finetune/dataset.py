"""Rows of text: from a file, a folder, the hub's cache or the ``datasets`` library, with every value checked."""

from __future__ import annotations

import csv
import hashlib
import importlib
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from splitlm.core.errors import DataMissingError, UsageError

_KINDS = (".jsonl", ".csv", ".parquet", ".txt")
_KEYS = "a text key (language modelling), text and label (classification), or question and answer"
_MAX_CLASSES = 1 << 20
_SETTING = "server.data-path"


class _Known(NamedTuple):
    """A data set we know by a short name."""

    hub: str
    folder: str
    """Where its repository keeps the splits; also the name of that configuration."""
    splits: Mapping[str, str]
    """Other names of its splits."""


_KNOWN: Mapping[str, _Known] = MappingProxyType(
    {
        "emotion": _Known("dair-ai/emotion", "split", MappingProxyType({})),
        "gsm8k": _Known("openai/gsm8k", "main", MappingProxyType({"validation": "test"})),
    }
)


@dataclass(frozen=True)
class Rows:
    """One split of a data set, as text.

    Attributes:
        source: the file or data set, for messages.
        texts: one per row: a text, or a question.
        labels: one class id per row, or none at all.
        answers: one per row, or none at all: what is to be learnt after the question.
    """

    source: str
    texts: tuple[str, ...]
    labels: tuple[int, ...] = ()
    answers: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def num_labels(self) -> int:
        """How many classes a model of these rows needs: the largest label + 1; 0 without labels."""
        return max(self.labels, default=-1) + 1

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the rows, in their order. It tells of a row to whoever can guess it: it stays with its owner."""
        digest = hashlib.sha256()
        for part in (self.texts, self.answers, tuple(map(str, self.labels))):
            for text in part:
                digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
            digest.update(b"\1")
        return digest.hexdigest()

    @property
    def groups(self) -> tuple[int, ...]:
        """What the rows are spread over owners by: their labels; without labels all are of one class."""
        return self.labels or (0,) * len(self.texts)


def load_rows(name_or_path: str, split: str, base: Path | None = None, *, label_key: str = "label") -> Rows:
    """The rows of one split.

    Looked for in this order: ``base``, if given, and nowhere else then; a file or folder of that name; the hub's cache
    on this machine; the ``datasets`` library, if it is installed.

    A file is JSON lines, CSV with a header, parquet (where pyarrow is installed) or plain text, of which every line
    that is not blank is a row. In a folder, a split is ``NAME_SPLIT`` or ``SPLIT`` with one of these endings. A single
    file serves ``train``, and the split that its name says; another split is looked for beside it, under its name with
    ``train`` replaced.

    Args:
        name_or_path: ``EMOTION``, ``GSM8K``, a hub id ``owner/name``, a file or a folder.
        split: ``train``, ``validation`` or ``test``; GSM8K, which has no ``validation``, gives ``test``.
        base: a local file or folder that has the rows.
        label_key: the key that holds a row's class.

    Raises:
        DataMissingError: the data is nowhere, or has no such split.
        UsageError: a row is not as it should be; the message names file and line.
    """
    short = name_or_path.lower()
    known = next((k for n, k in _KNOWN.items() if short in (n, k.hub.lower())), None)
    name = next((n for n, k in _KNOWN.items() if k is known), short.rstrip("/").rsplit("/", 1)[-1])
    split = known.splits.get(split, split) if known else split
    where = base or (None if known else Path(name_or_path))
    if where is not None and (base is not None or _exists(where)):
        return _read(_file(where, name, split), label_key)
    hub = known.hub if known else name_or_path
    if re.fullmatch(r"[\w.-]+/[\w.-]+", hub) and not hub.endswith(_KINDS):
        cached = _cached(hub)
        file = cached and _find(cached, known.folder if known else "data", name, split)
        if file:
            return _read(file, label_key)
        if _installed("datasets"):
            return _from_library(hub, known.folder if known else None, split, label_key)
        absent = "is not in the hub's cache, and the datasets library, which could fetch it, is not installed"
    else:
        absent = "is neither a file, a folder nor a hub id"
    raise DataMissingError(
        f"no hub and no path: {name_or_path} {absent}",
        where="server.data-name",
        expected=f"{', '.join(n.upper() for n in _KNOWN)}, a hub id, or a {', '.join(_KINDS)} file",
        remedy=f"Name a local file or folder with {_SETTING}, or install the extra: pip install 'splitlm[data]'",
    )


def _installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # a folder of that name in the working directory has no origin


def _exists(path: Path) -> bool:
    try:
        return path.expanduser().exists()
    except (OSError, RuntimeError):  # a name too long, a ~user who is not there
        return False


def _file(path: Path, name: str, split: str) -> Path:
    path = path.expanduser() if _exists(path) else path
    if path.is_dir():
        if found := _find(path, "data", name, split):
            return found
        raise DataMissingError(
            f"there is no split {split!r} in this folder",
            where=str(path),
            expected=f"{name}_{split} or {split}, ending in {', '.join(_KINDS)}",
        )
    if not path.is_file():
        raise DataMissingError(
            "there is no such file or folder", where=str(path), expected=f"a folder or {', '.join(_KINDS)}"
        )
    if split == "train" or re.search(rf"(?<![a-z]){re.escape(split)}(?![a-z])", path.stem):
        return path
    beside = path.with_name(re.sub(r"(?<![a-z])train(?![a-z])", split, path.stem) + path.suffix)
    if beside == path or not beside.is_file():
        raise DataMissingError(
            f"this file is no {split!r} split, and {beside.name if beside != path else 'another'} is not beside it",
            where=str(path),
            expected="a folder with one file for each split",
            remedy="Training rows are not taken for validation: give a folder, or turn validation off",
        )
    return beside


def _find(folder: Path, inner: str, name: str, split: str) -> Path | None:
    """A split's file in a folder, or in those where hub repositories keep it: ``inner``, and ``data`` in any case."""
    for place in dict.fromkeys((folder, folder / inner, folder / "data")):
        for stem in (f"{name}_{split}", f"{name}-{split}", split):
            for kind in _KINDS:
                if (place / (stem + kind)).is_file():
                    return place / (stem + kind)
        shards = sorted(place.glob(f"{split}-00000-of-00001.*"))
        if shards and shards[0].suffix in _KINDS:
            return shards[0]
    return None


def _cached(hub: str) -> Path | None:
    """The data set's snapshot in the hub's cache; never asks the network."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(hub, repo_type="dataset", local_files_only=True))
    except (errors.LocalEntryNotFoundError, errors.HFValidationError, OSError):
        return None


def _from_library(hub: str, config: str | None, split: str, label_key: str) -> Rows:
    datasets: Any = importlib.import_module("datasets")
    try:
        rows = datasets.load_dataset(hub, config, split=split)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError, LookupError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataMissingError(
            f"{'no hub and no path: ' * isinstance(error, OSError)}the datasets library cannot give {split!r} of {hub} "
            f"({type(error).__name__}: {reason})",
            where="server.data-name",
            expected="a data set in its cache, or a hub that answers",
            remedy=f"Name a local file or folder with {_SETTING}, or unset HF_HUB_OFFLINE",
        ) from error
    return _rows(hub, ((f"row {i}", row) for i, row in enumerate(rows)), label_key)


def _read(path: Path, label_key: str) -> Rows:
    """One file's rows, by its ending."""
    kind = path.suffix.lower()
    try:
        if kind == ".parquet":
            return _rows(str(path), _parquet(path), label_key)
        with path.open(encoding="utf-8-sig", newline="") as lines:
            if kind == ".jsonl":
                return _rows(str(path), _jsonl(path, lines), label_key)
            if kind == ".csv":
                return _rows(str(path), _csv(path, lines, label_key), label_key)
            if kind == ".txt":
                return _rows(
                    str(path),
                    ((f"line {n}", {"text": line.rstrip("\r\n")}) for n, line in enumerate(lines, 1) if line.strip()),
                    label_key,
                )
    except UnicodeDecodeError as error:
        raise UsageError(f"byte {error.start} is not UTF-8", where=str(path), expected="text in UTF-8") from error
    except csv.Error as error:
        raise UsageError(
            f"not CSV: {error}", where=str(path), expected="a header and rows of as many fields"
        ) from error
    except OSError as error:
        raise UsageError(f"this cannot be read ({error})", where=str(path), expected="a file of rows") from error
    raise UsageError(f"a file ending in {kind!r}", where=str(path), expected=", ".join(_KINDS))


def _jsonl(path: Path, lines: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line, object_pairs_hook=_object)
            except _TwiceError as twice:
                raise UsageError(
                    f"the key {str(twice)[:80]!r} stands twice",
                    where=f"{path}, line {number}",
                    expected="each key once in a row",
                ) from None
            except (ValueError, RecursionError) as error:
                raise UsageError(
                    f"not JSON: {error}", where=f"{path}, line {number}", expected="one JSON object on each line"
                ) from error


class _TwiceError(Exception):
    """A name that a row has twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(next(name for name in names if names.count(name) > 1))
    return found


def _csv(path: Path, lines: Iterable[str], label_key: str) -> Iterator[tuple[str, Any]]:
    reader = csv.DictReader(lines, strict=True)
    reader.fieldnames = names = [name.strip() for name in reader.fieldnames or ()]
    for name in names:
        quoted = name.startswith('"')
        if quoted or (name in ("text", "question", "answer", label_key) and names.count(name) > 1):
            raise UsageError(
                f"the header has {name[:80]!r}{' after a space' if quoted else ' twice'}",
                where=f"{path}, line {reader.line_num}",
                expected="no space before a double quote" if quoted else "each column once",
            )
    for row in reader:
        if None in row:
            raise UsageError(
                "more fields than the header has",
                where=f"{path}, line {reader.line_num}",
                expected="as many fields in every row",
                remedy="Put a text that has commas between double quotes",
            )
        label = row.get(label_key)
        # CSV has no numbers; what is not one stays a string, and is refused as such.
        number = label is not None and re.fullmatch(r"\s*-?\d{1,9}\s*", label, re.ASCII)
        yield f"line {reader.line_num}", {**row, label_key: int(label)} if label is not None and number else row


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    if not _installed("pyarrow"):
        raise UsageError(
            "a parquet file, and pyarrow is not installed",
            where=str(path),
            remedy="Install the extra: pip install 'splitlm[data]', or convert the file to .jsonl",
        )
    parquet: Any = importlib.import_module("pyarrow.parquet")
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError, RuntimeError, LookupError) as error:  # pyarrow's own errors are of these classes
        raise UsageError(f"not a parquet file ({error})", where=str(path), expected="rows in parquet") from error
    yield from ((f"row {i}", row) for i, row in enumerate(rows))


def _rows(source: str, found: Iterable[tuple[str, Any]], label_key: str) -> Rows:
    """Checks every row; what one of them has, all must have."""
    rows = list(found)
    for place, row in rows:
        if not isinstance(row, Mapping):
            raise UsageError(f"a row is a {type(row).__name__}", where=f"{source}, {place}", expected=_KEYS)
    if not rows:
        raise UsageError("there is no row in it", where=source, expected=f"rows with {_KEYS}")
    keys = {key for _, row in rows for key in row}
    if {"question", "answer"} <= keys:
        texts = tuple(_text(source, place, row, "question") for place, row in rows)
        return Rows(source, texts, answers=tuple(_text(source, place, row, "answer") for place, row in rows))
    if "text" not in keys:
        found_keys = ", ".join(sorted(map(str, keys)))
        raise UsageError(f"rows with the keys {found_keys or '(none)'}", where=source, expected=f"rows with {_KEYS}")
    texts = tuple(_text(source, place, row, "text") for place, row in rows)
    if label_key not in keys:
        return Rows(source, texts)
    return Rows(source, texts, labels=tuple(_label(source, place, row, label_key) for place, row in rows))


def _text(source: str, place: str, row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        what = f"{key} is missing" if value is None else f"{key} is {value!r:.60}"
        raise UsageError(what, where=f"{source}, {place}", expected="a text that is not blank")
    return value


def _label(source: str, place: str, row: Mapping[str, Any], key: str) -> int:
    value = row.get(key)
    if type(value) is not int or not 0 <= value < _MAX_CLASSES:
        what = f"{key} is missing" if value is None else f"{key} is {value!r:.60}"
        raise UsageError(
            what,
            where=f"{source}, {place}",
            expected=f"a class id, a whole number from 0 to {_MAX_CLASSES - 1}",
            remedy="Number the classes from 0" if isinstance(value, str) else "",
        )
    return value
