"""The file of settings of a run, and the folder that it leaves."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from splitlm.core.config import RunConfig, override, read
from splitlm.core.errors import UsageError


def read_run(source: Path | Mapping[str, object], changes: Sequence[str] = ()) -> RunConfig:
    """The settings of a run, checked.

    Args:
        source: a YAML file, from whose folder relative paths count; or what it would hold, whose paths count from here.
        changes: ``a.b=c`` each, see ``core.config.override``.

    Raises:
        UsageError: the file is not there, is not YAML, or a setting is wrong.
        CutError: a cut that no model can have.
    """
    if isinstance(source, Path):
        mapping, where, folder = _mapping(source), str(source), source.resolve().parent
    else:
        mapping, where, folder = source, "config", Path.cwd()

    def at(path: str) -> str:
        return str(folder / Path(path).expanduser())

    if not isinstance(mapping, Mapping | None):
        raise UsageError(
            f"The file holds {type(mapping).__name__}", where=where, expected="a mapping of sections, as configs/ has"
        )
    config = read(override(mapping, changes, _value), where).rooted(at)
    config.check()
    return config


def run_folder(config: RunConfig, folder: Path | None = None) -> Path:
    """The folder of a new run, made: the one that is named, or a new one below ``log_path``.

    Raises:
        UsageError: it cannot be made, or a run lies there.
    """
    place = folder or Path(config.log_path) / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    if any((place / name).exists() for name in ("config.yaml", "rounds")):
        raise UsageError("Another run lies here", where=str(place), expected="a new folder")
    try:
        place.mkdir(parents=True, exist_ok=folder is not None)
    except OSError as error:
        raise UsageError(
            f"The run's folder cannot be made ({error.strerror or error})",
            where=str(place),
            expected="a folder that can be written",
            remedy="Choose another with --folder, or another log_path",
        ) from error
    return place


def _mapping(path: Path) -> object:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"The settings cannot be read ({getattr(error, 'strerror', None) or error})",
            where=str(path),
            expected="a YAML file",
            remedy="configs/ holds some to begin with",
        ) from error
    except yaml.YAMLError as error:
        raise UsageError(
            f"The file is not YAML ({' '.join(str(error).split())[:300]})", where=str(path), expected="settings"
        ) from error


def _value(text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{text!r} is no value", where="--set", expected="a YAML value") from error
