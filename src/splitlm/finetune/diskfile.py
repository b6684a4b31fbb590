"""Files that are there whole or not at all, and files that grow by whole lines."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from splitlm.model.checkpoint import flush


@contextlib.contextmanager
def written(path: Path) -> Iterator[Path]:
    """A temporary name in the same folder to write to; it becomes ``path`` once its bytes are on the disk.

    Raises:
        OSError: it cannot be written; no temporary file is left.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        yield temporary
        flush(temporary)
        temporary.replace(path)
        flush(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write(path: Path, data: bytes) -> None:
    """A whole file in one step.

    Raises:
        OSError: it cannot be written; what was there before is as it was.
    """
    with written(path) as temporary:
        temporary.write_bytes(data)


def sha256(path: Path) -> str:
    """Of a file's bytes.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def append(path: Path, line: bytes) -> None:
    """One line at the end of a file. A line that a crash left half is ended first.

    Raises:
        OSError: it cannot be written; the file is as it was.
    """
    with path.open("ab") as file:
        size = file.tell()
        try:
            if size and _last_byte(path) != b"\n":
                file.write(b"\n")
            file.write(line)
            file.flush()
        except OSError:
            os.truncate(path, size)
            raise


def append_row(path: Path, row: Mapping[str, object]) -> None:
    """One row at the end of a CSV file, under its header; the header grows by what the row has more.

    Raises:
        OSError: it cannot be written; the file is as it was.
    """
    header: list[str] = []
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            header = next(csv.reader(file), [])
    columns = [*header, *(key for key in row if key not in header)]
    line = _lines([{key: _cell(value) for key, value in row.items()}], columns)
    if columns == header:
        append(path, line)
        return
    rows: list[dict[str, str]] = []
    if header:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, restval=""))
            for earlier in rows:
                earlier.pop(None, None)  # type: ignore[call-overload]  # a line that a crash joined to another
    write(path, _lines([dict(zip(columns, columns, strict=True)), *rows], columns) + line)


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


def _lines(rows: list[dict[str, str]], columns: list[str]) -> bytes:
    text = io.StringIO(newline="")
    csv.DictWriter(text, columns, restval="", lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _cell(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
