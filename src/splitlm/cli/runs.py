"""Where a run leaves its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from splitlm.core.errors import UsageError
from splitlm.telemetry.folder import run_folder, write_run


def run_dir(
    verb: str, trace_dir: Path | None, no_trace: bool, label: str = "", config: Mapping[str, object] | None = None
) -> Path | None:
    """The folder of a run, made, with its resolved settings inside; None with ``--no-trace``.

    Raises:
        UsageError: it cannot be made.
    """
    if no_trace:
        return None
    try:
        if trace_dir is not None:
            trace_dir.mkdir(parents=True, exist_ok=True)
            folder = trace_dir
        else:
            folder = run_folder(Path("runs"), verb, label)
        if config is not None:
            write_run(folder, verb, config)
    except OSError as error:
        raise UsageError(
            f"The run's folder cannot be made ({error.strerror})",
            where=str(trace_dir or Path("runs").absolute()),
            remedy="Choose another with --trace-dir, or use --no-trace",
        ) from error
    return folder
