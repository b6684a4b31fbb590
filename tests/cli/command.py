"""The command line as tests run it: in this process where that shows the same, as a process where it does not."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO
from unittest import mock

from tests.forks import told

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def paragraph(self) -> str:
        """The error: the one line that begins with the program's name. Other lines are progress and warnings."""
        lines = [line for line in self.err.splitlines() if line]
        errors = [line for line in lines if line.startswith("splitlm: ")]
        strange = [line for line in lines if not re.match(r"splitlm: |· |[\d:]{8} WARNING ", line)]
        assert len(errors) == 1 and not strange, self.err
        return errors[0].removeprefix("splitlm: ")


def run(*arguments: str | Path, stdin: str = "") -> Done:
    """A command in this process."""
    from splitlm.cli.main import run as cli

    out, err = io.StringIO(), io.StringIO()
    logger = logging.getLogger("splitlm")
    before = (logger.handlers, logger.level, logger.propagate)
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch.object(sys, "stdin", io.StringIO(stdin)),
        ):
            code = cli([str(a) for a in arguments])
    finally:
        logger.handlers, logger.level, logger.propagate = before
    return Done(code, out.getvalue(), err.getvalue())


@dataclass
class Process:
    """A command as a process of a session of its own, as a terminal's is."""

    popen: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    @property
    def session(self) -> int:
        """The id by which its descendants are found, even those that are sessions of their own."""
        return self.popen.pid

    def read_until(self, text: str) -> str:
        """Read stderr up to a line that holds the text, and return that line."""
        assert self.popen.stderr is not None
        line = b""
        while letter := os.read(self.popen.stderr.fileno(), 1):  # and not a letter more: ``communicate`` gives the rest
            line += letter
            if letter == b"\n":
                self.lines.append(line.decode())
                if text in self.lines[-1]:
                    return self.lines[-1]
                line = b""
        raise AssertionError(f"{text!r} never came:\n{''.join(self.lines)}")

    def wait(self, timeout: float = 60) -> Done:
        """Its end."""
        out, err = self.popen.communicate(timeout=timeout)
        return Done(self.popen.returncode, out, "".join(self.lines) + err)

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to it alone or, as a terminal does, to its group."""
        os.killpg(self.popen.pid, number) if group else self.popen.send_signal(number)


@contextlib.contextmanager
def start(
    *arguments: str | Path, mark: str = "", env: dict[str, str] | None = None, stdout: int | IO[str] = subprocess.PIPE
) -> Iterator[Process]:
    """A command as a process; whatever is left of it in the end is killed.

    Args:
        mark: a value of an environment variable by which ``left`` finds it and all its descendants.
    """
    popen = subprocess.Popen(
        [sys.executable, "-m", "splitlm", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "SPLITLM_TEST_MARK": mark, **(env or {})},
        start_new_session=True,
    )
    try:
        yield Process(popen)
    finally:
        for pid in left(mark) if mark else [popen.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        popen.communicate()


def left(mark: str) -> list[int]:
    """Processes that were started with this mark, by their parents or by us, and still run."""
    wanted = f"SPLITLM_TEST_MARK={mark}".encode()
    found = []
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        with contextlib.suppress(OSError):
            born = wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if pid != os.getpid() and (born or told(pid).get("env", {}).get("SPLITLM_TEST_MARK") == mark):
                found.append(pid)
    return found


def all_gone(mark: str, within_s: float = 20) -> bool:
    """Whether every process with this mark ends in time."""
    deadline = time.monotonic() + within_s
    while left(mark):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def free_port() -> int:
    """A port that nobody held a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether the port can be listened on."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
            sock.listen()
        except OSError:
            return False
    return True
