"""The folder of a run: one layout for every verb."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

import msgspec

LIBRARIES = ("splitlm", "torch", "transformers", "safetensors", "tokenizers", "msgspec", "numpy")


def run_folder(base: Path, verb: str, label: str = "") -> Path:
    """Make and return ``<base>/<time>-<verb>[-<label>]``, a folder that did not exist before.

    Two runs within one second get different folders: the later one ends in ``.2``. Characters of the label that are
    awkward in a path become ``-``.

    Raises:
        OSError: the folder cannot be made.
    """
    words = [time.strftime("%Y%m%d-%H%M%S"), verb, re.sub(r"[^A-Za-z0-9_=-]+", "-", label).strip("-")]
    name = "-".join(word for word in words if word)
    base.mkdir(parents=True, exist_ok=True)
    count = 1
    while True:
        folder = base / (name if count == 1 else f"{name}.{count}")
        try:
            folder.mkdir()
        except FileExistsError:
            count += 1
        else:
            return folder


def versions(libraries: Iterable[str] = LIBRARIES) -> dict[str, str]:
    """Versions of Python and of those libraries that are installed; imports none of them."""
    found = {"python": platform.python_version()}
    for name in libraries:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_run(folder: Path, verb: str, config: Mapping[str, object]) -> Path:
    """Write ``run.json``: the verb, its resolved configuration (JSON values, paths allowed) and the versions.

    Raises:
        OSError: the file cannot be written.
    """
    run = {
        "verb": verb,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "config": dict(config),
        "versions": versions(),
        "platform": platform.platform(),
    }
    path = folder / "run.json"
    write_whole(path, msgspec.json.format(msgspec.json.encode(run, enc_hook=str), indent=2) + b"\n")
    return path


def write_whole(path: Path, data: bytes) -> None:
    """A file that is there whole or not at all.

    Raises:
        OSError: it cannot be written; what was there before is as it was.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
