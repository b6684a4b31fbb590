"""The file of settings of a run, and the folder that it leaves."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import yaml

from splitlm.core.config import RunConfig, override, read
from splitlm.core.errors import UsageError

_MERGE = "tag:yaml.org,2002:merge"
_NOT_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError)
"""What PyYAML raises: errors of its own, and those of ``!!timestamp x``, ``!!bool x``, a 13th month, deep brackets."""


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
    config = read(override(mapping, changes, _value), where)
    config.check()  # first, while every path is as it was written
    return config.rooted(at)


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


def _load(text: str, where: str) -> object:
    """What a YAML text holds.

    Raises:
        UsageError: a key stands twice, of which PyYAML would take the last.
    """
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_once(node, where)
        return cast(object, loader.construct_document(node))
    finally:
        loader.dispose()


def _check_once(root: yaml.Node, where: str) -> None:
    """Refuse a key that stands twice in a mapping as it is written: before what ``<<`` names is put in."""
    nodes, seen = [root], set()
    while nodes:
        node = nodes.pop()
        if id(node) in seen or isinstance(node, yaml.ScalarNode):
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            nodes += reversed(node.value)
            continue
        nodes += [value for _, value in reversed(node.value)]
        first: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            line, name = key.start_mark.line + 1, (key.tag, key.value)
            if name in first:
                raise UsageError(
                    f"The key {key.value[:80]!r} stands twice in one section, first in line {first[name]}",
                    where=f"{where}, line {line}",
                    expected="each key once",
                    remedy="Leave one out, or join the two sections",
                )
            first[name] = line


def _mapping(path: Path) -> object:
    try:
        return _load(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"The settings cannot be read ({getattr(error, 'strerror', None) or error})",
            where=str(path),
            expected="a YAML file",
            remedy="configs/ holds some to begin with",
        ) from error
    except _NOT_YAML as error:
        raise UsageError(
            f"The file is not YAML ({' '.join(str(error).split())[:300]})", where=str(path), expected="settings"
        ) from error


def _value(text: str) -> object:
    try:
        return _load(text, "--set")
    except _NOT_YAML as error:
        raise UsageError(f"{text!r} is no value", where="--set", expected="a YAML value") from error
