"""Results as files: a JSON per run, and the performance table of a README made from one."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec

from splitlm.bench.figure import Figure, Result, markdown, read_json, write_json
from splitlm.core.errors import UsageError
from splitlm.telemetry.folder import versions

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def machine() -> str:
    """This machine in words: cores that this process may use, and their kind."""
    return f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, {platform.system()}"


def save(path: Path, bench: str, settings: dict[str, str | int | float], figures: list[Figure]) -> None:
    """Write a result.

    Raises:
        UsageError: the file cannot be written.
    """
    result = Result(bench=bench, settings=settings, versions=versions(), machine=machine(), figures=figures)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(write_json(result))
    except OSError as error:
        raise UsageError(f"The result cannot be written ({error.strerror})", where=f"--json {path}") from error


def load(path: Path) -> Result:
    """Read a result.

    Raises:
        UsageError: it cannot be read, or is none.
    """
    try:
        return read_json(path.read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"This is not a result: {error}", where=str(path), expected="a file that splitlm bench --json wrote"
        ) from error


def block(results: list[Result]) -> str:
    """The Markdown between the marks: one table per result, each with the command that gives it."""
    parts = []
    for result in results:
        settings = result.settings
        words = [str(settings["model"])] if "model" in settings else []
        words += [f"--{name} {value}" for name, value in settings.items() if name != "model"]
        parts.append(
            f"`splitlm bench {' '.join([result.bench, *words])}` on {result.machine}, "
            f"torch {result.versions.get('torch', '?')}; medians, least and largest value of one run:\n\n"
            f"{markdown(result.figures)}"
        )
    return "\n".join(parts)


def replace(text: str, table: str, where: str) -> str:
    """The text with everything between the two marks replaced.

    Raises:
        UsageError: the marks are not there, once each and in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise UsageError("There is no place for the table", where=where, expected=f"{BEGIN} and {END}, once each")
    return f"{before}{BEGIN}\n\n{table.strip()}\n\n{END}{after}"
