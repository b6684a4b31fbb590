"""What a verb says, and where: results to stdout, progress and logs to stderr."""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import dataclass
from typing import Any

from splitlm.core.errors import UsageError

LEVELS = ("debug", "info", "warning", "error")


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """One log line as a JSON object."""
        line = {"time": time.time(), "level": record.levelname.lower(), "logger": record.name}
        line["message"] = record.getMessage()
        return json.dumps(line)


@dataclass
class Console:
    """The settings of the common options, and the two voices."""

    log_level: str = "warning"
    log_json: bool = False
    quiet: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        if self.log_level not in LEVELS:
            raise UsageError(f"{self.log_level!r} is no level", where="--log-level", expected=", ".join(LEVELS))
        handler = logging.StreamHandler(sys.stderr)
        plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
        handler.setFormatter(_JsonLines() if self.log_json else plain)
        root = logging.getLogger("splitlm")
        root.handlers = [handler]
        root.setLevel(self.log_level.upper())
        root.propagate = False

    def say(self, text: str) -> None:
        """One line of progress."""
        if not self.quiet:
            print(f"· {text}", file=sys.stderr, flush=True)

    def out(self, text: str, end: str = "\n") -> None:
        """A part of the result."""
        print(text, end=end, flush=True)

    def json(self, data: Any) -> None:
        """The result, for machines."""
        print(json.dumps(data, ensure_ascii=False), flush=True)


def console(context: Any) -> Console:
    """The console of a verb's context."""
    return context.obj if isinstance(context.obj, Console) else Console()
