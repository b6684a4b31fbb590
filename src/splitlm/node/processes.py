"""Stages as child processes on this machine: started, watched, and always ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from splitlm.core.errors import NetworkError, SplitlmError, UsageError, from_exit_code
from splitlm.node.package import own_package
from splitlm.node.settings import RingSettings
from splitlm.telemetry.sinks import clear_run

GRACE_S = 5.0
HURRY_S = 0.5
"""Of processes that have nothing to save, and of those that did not answer."""
TAIL_BYTES = 8192


class StageProcess:
    """One child of a verb of ours (``stage --join``, ``client --join``); its output goes to a file.

    Args:
        arguments: of the verb.
        log: where its output goes; None keeps it in a file without a name, which is gone with the last process that
            has it open, however that ends.
        environment: added to this process's own.
        verb: what it does.

    Raises:
        UsageError: the log cannot be written.
        NetworkError: the process cannot be started.
    """

    def __init__(
        self, arguments: Sequence[str], *, log: Path | None, environment: Mapping[str, str], verb: str = "stage"
    ) -> None:
        self.log = log
        try:
            self._output: IO[bytes] = log.open("ab+") if log else tempfile.TemporaryFile()  # noqa: SIM115 - ``end`` closes
        except OSError as error:
            raise UsageError(
                f"A stage's log cannot be written ({error.strerror or error})",
                where=str(log or tempfile.gettempdir()),
                remedy="Choose another --trace-dir",
            ) from error
        try:
            # A group of its own: Ctrl-C in the terminal reaches the head alone, which then stops the stages in order.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "splitlm", verb, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **own_package(), **environment},
                start_new_session=True,
            )
        except OSError as error:
            self._output.close()
            raise NetworkError(
                f"A stage process could not be started ({error.strerror or error})",
                where=sys.executable,
                remedy="Check the limits on processes and memory of this machine",
            ) from error

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, None while it runs; negative when a signal ended it."""
        return self._process.poll()

    def fate(self) -> str:
        """How it ended, as the end of a sentence that begins with the process; empty while it runs."""
        code = self.exit_code
        if code is None:
            return ""
        at = f" (log: {self.log})" if self.log else ""
        if code < 0:
            return f"was ended by {_signal_name(-code)}{at}"
        words = self._last_words()
        return f"ended with exit code {code}{at}" + (f": {words}" if words else "")

    def failure(self) -> SplitlmError | None:
        """Why it ended before its time, from its exit code and its last words; None while it runs."""
        code = self.exit_code
        if code is None:
            return None
        words = self._last_words() if code > 0 else ""
        if words:
            return from_exit_code(code, words)
        return NetworkError(f"The stage process {self.pid} {self.fate()}", expected="it to run until the ring is done")

    def _last_words(self) -> str:
        """Its error paragraph, or else its last lines; nothing once it was ended by us."""
        if self._output.closed:
            return ""
        fd = self._output.fileno()
        size = os.fstat(fd).st_size
        # pread leaves the place alone at which the child, which shares it, writes on.
        lines = os.pread(fd, TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace").splitlines()
        errors = [line.removeprefix("splitlm: ") for line in lines if line.startswith("splitlm: ")]
        return errors[-1] if errors else " ".join(line.strip() for line in lines[-3:])

    def wait(self, timeout: float) -> bool:
        """Wait for its end; whether it came."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
            return True
        return False

    def end(self) -> None:
        """Kill it if it still runs, and reap it; safe to call twice, and from any thread."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
        self._output.close()


def fresh_folder(folder: Path) -> None:
    """Make the folder of a ring's traces and logs; of an older ring's, nothing stays that could be taken for ours.

    Raises:
        UsageError: it cannot be made or cleared.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clear_run(folder)
    except OSError as error:
        raise UsageError(
            f"The folder cannot be made or used again ({error.strerror or error})",
            where=str(error.filename or folder),
            remedy="Choose another one",
        ) from error


def start_stages(settings: RingSettings, port: int, count: int) -> list[StageProcess]:
    """Start ``count`` stages on this machine that join the head at ``port``; all or none.

    Raises:
        UsageError: a log cannot be written.
        NetworkError: a process cannot be started.
    """
    logs = settings.trace_dir
    arguments = [str(settings.folder), "--join", f"127.0.0.1:{port}", "--parent", str(os.getpid())]
    arguments += ["--deadline", str(settings.deadline_s), "--ctrl-timeout", str(settings.ctrl_timeout_s)]
    if settings.tls is not None:
        arguments += ["--tls", str(settings.tls)]
    if logs is None:
        arguments += ["--no-trace"]
    else:
        arguments += ["--trace-dir", str(logs)]
    environment = {"SPLITLM_TOKEN": settings.token, "OMP_WAIT_POLICY": "PASSIVE"}
    started: list[StageProcess] = []
    try:
        for number in range(1, count + 1):
            log = logs / f"stage-{number}.log" if logs else None
            started.append(StageProcess(arguments, log=log, environment=environment))
    except BaseException:
        end_all(started, grace=0)
        raise
    return started


def end_all(processes: Sequence[StageProcess], grace: float = GRACE_S) -> None:
    """Give processes that were told to stop some time to do so, then end those that did not; all are reaped."""
    deadline = time.monotonic() + grace
    for process in processes:
        process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.end()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
