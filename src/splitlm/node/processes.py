"""Stages as child processes on this machine: started, watched, and always ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from splitlm.core.errors import NetworkError, SplitlmError, from_exit_code

GRACE_S = 5.0
TAIL_BYTES = 8192


class StageProcess:
    """One ``splitlm stage --join`` child; its output goes to a file.

    Args:
        arguments: of ``splitlm stage``.
        log: where its output goes; None discards it but for the last lines.
        environment: added to this process's own.
    """

    def __init__(self, arguments: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> None:
        self.log = log
        self._output: IO[bytes] = log.open("ab")
        # A group of its own: Ctrl-C in the terminal reaches the head alone, which then stops the stages in order.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "splitlm", "stage", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, None while it runs; negative when a signal ended it."""
        return self._process.poll()

    def failure(self) -> SplitlmError | None:
        """Why it ended before its time, from its exit code and its last words; None while it runs or after success."""
        code = self.exit_code
        if code is None or code == 0:
            return None
        if code < 0:
            name = signal.Signals(-code).name
            return NetworkError(f"The stage process {self.pid} was ended by {name}", where=str(self.log))
        return from_exit_code(
            code, self._last_words() or f"A stage process ended with exit code {code}; see {self.log}"
        )

    def _last_words(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        errors = [line.removeprefix("splitlm: ") for line in lines if line.startswith("splitlm: ")]
        return errors[-1] if errors else " ".join(line.strip() for line in lines[-3:])

    def wait(self, timeout: float) -> bool:
        """Wait for its end; whether it came."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
            return True
        return False

    def end(self) -> None:
        """Kill it if it still runs, and reap it."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
        self._output.close()


def end_all(processes: Sequence[StageProcess], grace: float = GRACE_S) -> None:
    """Give processes that were told to stop some time to do so, then end those that did not; all are reaped."""
    deadline = time.monotonic() + grace
    for process in processes:
        process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.end()
