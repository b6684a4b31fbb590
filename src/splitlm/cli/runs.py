"""Where a run leaves its files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from splitlm.cli import options as o
from splitlm.core.errors import UsageError
from splitlm.telemetry.folder import run_folder, write_run, write_whole


@dataclass(frozen=True)
class RunOptions:
    """Where a run's trace, logs and result go."""

    trace_dir: o.TraceDir = None
    no_trace: o.NoTrace = False
    run_label: o.RunLabel = ""

    @contextmanager
    def folder(self, verb: str, config: Mapping[str, object] | None = None) -> Iterator[Path | None]:
        """The run's folder, made, while it runs; a run that failed before it began leaves none behind."""
        new = self.trace_dir is None or _missing(self.trace_dir)
        folder = run_dir(verb, self.trace_dir, self.no_trace, self.run_label, config)
        try:
            yield folder
        except BaseException:
            if folder is not None and new:
                _remove_if_idle(folder)
            raise


def run_dir(
    verb: str, trace_dir: Path | None, no_trace: bool, label: str = "", config: Mapping[str, object] | None = None
) -> Path | None:
    """The folder of a run, made, with its resolved settings inside; None with ``--no-trace``.

    Raises:
        UsageError: it cannot be made; what was made for it until then is gone again.
    """
    if no_trace:
        return None
    base, folder = trace_dir or Path("runs"), None
    missing = [path for path in (base, *base.parents) if _missing(path)]
    try:
        if trace_dir is not None:
            trace_dir.mkdir(parents=True, exist_ok=True)
            folder = trace_dir
        else:
            folder = run_folder(Path("runs"), verb, label)
        if config is not None:
            write_run(folder, verb, config)
    except OSError as error:
        for path in ([folder] if folder is not None and trace_dir is None else []) + missing:
            with suppress(OSError):  # such as that something else is in it by now
                path.rmdir()
        raise UsageError(
            f"The run's folder cannot be made ({error.strerror})",
            where=str(trace_dir or Path("runs").absolute()),
            remedy="Choose another with --trace-dir, or use --no-trace",
        ) from error
    return folder


def keep_result(folder: Path | None, found: Mapping[str, object]) -> None:
    """Write ``result.json``, what a verb prints with ``--json``, into a run's folder.

    Raises:
        UsageError: it cannot be written.
    """
    if folder is None:
        return
    try:
        write_whole(folder / "result.json", json.dumps(found, indent=2).encode() + b"\n")
    except OSError as error:
        raise UsageError(f"The result cannot be written ({error.strerror})", where=str(folder)) from error


def _missing(path: Path) -> bool:
    """Whether nothing is there; False where that cannot be found out."""
    try:
        return not path.exists()
    except OSError:
        return False


def _remove_if_idle(folder: Path) -> None:
    """Take away a folder in which nothing lies but its settings."""
    with suppress(OSError):
        if all(path.name == "run.json" for path in folder.iterdir()):
            (folder / "run.json").unlink(missing_ok=True)
            folder.rmdir()
