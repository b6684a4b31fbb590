"""What a verb says, and where: results to stdout, progress, logs and errors to stderr."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from splitlm.core.errors import SplitlmError, UsageError

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.progress import Progress
    from rich.status import Status

LEVELS = ("debug", "info", "warning", "error")


class ReaderGoneError(Exception):
    """Whoever read our results went away (``| head``): that is its right, and the end of our work."""


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """One log line as a JSON object; an exception's traceback and a stack are fields of their own."""
        line = {"time": record.created, "level": record.levelname.lower(), "logger": record.name}
        line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps(line)


class _ToStderr(logging.StreamHandler[TextIO]):
    """Writes to what is stderr now: a spinner puts a proxy there, above which other lines appear."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class Console:
    """The settings that every verb takes, and the voices.

    On a terminal, ``say`` shows a spinner with what is awaited, and leaves a line when it is done. In a pipe it is a
    plain line. Colour follows ``NO_COLOR``. May be used from several threads.
    """

    def __init__(self) -> None:
        self.log_level, self.log_json, self.quiet, self.debug = "warning", False, False, False
        self._lock = threading.RLock()
        self._rich: RichConsole | None = None
        self._status: Status | None = None
        self._awaited = ""

    def set(self, **changes: Any) -> None:
        """Change settings by name; logging follows.

        Raises:
            UsageError: an unknown log level.
        """
        for name, value in changes.items():
            setattr(self, name, value)
        if self.log_level not in LEVELS:
            raise UsageError(f"{self.log_level!r} is no level", where="--log-level", expected=", ".join(LEVELS))
        handler = _ToStderr()
        handler.setLevel(self.log_level.upper())
        handler.setFormatter(self._formatter())
        root = logging.getLogger("splitlm")
        root.handlers = [handler]
        root.setLevel(self.log_level.upper())
        root.propagate = False

    @contextlib.contextmanager
    def logged(self, path: Path, *, debug: bool = False) -> Iterator[None]:
        """Write log lines to a file as well for a while, from ``info`` on, or with ``debug`` all of them.

        Raises:
            UsageError: it cannot be written.
        """
        root = logging.getLogger("splitlm")
        try:
            handler = logging.FileHandler(path, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"The log cannot be written ({error.strerror})", where=str(path)) from error
        level, wanted = root.level, logging.DEBUG if debug else logging.INFO
        handler.setLevel(wanted)
        handler.setFormatter(self._formatter())
        root.addHandler(handler)
        root.setLevel(min(level, wanted) if level else wanted)
        try:
            yield
        finally:
            root.removeHandler(handler)
            root.setLevel(level)
            handler.close()

    def progress(self, *columns: Any) -> Progress | None:
        """A progress bar on the terminal, to be started and stopped; None in a pipe and with ``--quiet``."""
        if self.quiet or not sys.stderr.isatty():
            return None
        from rich.progress import Progress

        self.done()
        return Progress(*columns, console=self._terminal(), transient=True)

    def _formatter(self) -> logging.Formatter:
        plain = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        return _JsonLines() if self.log_json else logging.Formatter(plain, "%H:%M:%S")

    def say(self, text: str) -> None:
        """What is done or awaited from now on."""
        if self.quiet:
            return
        with self._lock:
            if not sys.stderr.isatty() and self._status is None:
                self._line(text)
                return
            self._settle()
            self._awaited = text
            if self._status is None:
                self._status = self._terminal().status("")
                self._status.start()
            self._status.update(_escaped(text))

    def done(self) -> None:
        """Nothing is awaited any more: the spinner stops, and leaves its line."""
        with self._lock:
            self._settle()
            if self._status is not None:
                self._status.stop()
                self._status = None

    def note(self, text: str) -> None:
        """One line that stays, and awaits nothing."""
        self.done()
        if not self.quiet:
            self._line(text)

    def warn(self, text: str) -> None:
        """What went otherwise than asked, where the result stands all the same; also with ``--quiet``."""
        self.done()
        _complain(f"splitlm: warning: {text}")

    def error(self, text: str) -> None:
        """The paragraph with which a process ends; also with ``--quiet``."""
        self.done()
        _complain(f"splitlm: {text}")

    def out(self, text: str, end: str = "\n") -> None:
        """A part of the result.

        Raises:
            ReaderGoneError: nobody reads it any more.
            SplitlmError: it cannot be written (a full disk).
        """
        self.done()
        try:
            print(text, end=end, flush=True)
        except BrokenPipeError:
            raise ReaderGoneError from None
        except OSError as error:
            raise SplitlmError(
                f"The result cannot be written ({error.strerror})", where="stdout", remedy="Send it elsewhere"
            ) from error

    def json(self, data: Any) -> None:
        """The result, for machines: one line; null where a number is not finite. Raises like ``out``."""
        self.out(msgspec.json.encode(data).decode())

    def _terminal(self) -> RichConsole:
        if self._rich is None:
            from rich.console import Console as RichConsole

            self._rich = RichConsole(stderr=True, highlight=False)
        return self._rich

    def _settle(self) -> None:
        """The spinner's text becomes a line that stays."""
        if self._awaited:
            self._line(self._awaited)
            self._awaited = ""

    def _line(self, text: str) -> None:
        if self._status is not None:
            self._terminal().print(f"· {text}", markup=False)
        else:
            _complain(f"· {text}")


def _complain(text: str) -> None:
    """Write to stderr, if that is possible: progress that nobody can take (a full disk) must not end a run."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def console(context: Any) -> Console:
    """The console of a verb's context."""
    if not isinstance(context.obj, Console):
        context.obj = Console()
    found: Console = context.obj
    return found
