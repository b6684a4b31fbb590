"""A child of this process, as ``os.fork`` makes one: with its memory, and without its threads."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

LIMIT_S = 20


def forked(work: Callable[[], object]) -> int:
    """Do this in a child; its exit code: 0 where nothing was raised, below 0 where it hung until its alarm."""
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT_S)
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
