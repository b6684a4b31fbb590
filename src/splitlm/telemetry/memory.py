"""How much memory this process holds."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

STATM = Path("/proc/self/statm")
STATUS = Path("/proc/self/status")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def rss_bytes() -> int:
    """Resident memory now, in bytes. Where the system does not tell (off Linux), the peak stands in for it.

    Read once per token, so through ``os`` alone: some 6 µs, a tenth of what ``Path.read_bytes`` takes.
    """
    try:
        fd = os.open(STATM, os.O_RDONLY)
        try:
            return int(os.read(fd, 256).split()[1]) * PAGE_BYTES
        finally:
            os.close(fd)
    except (OSError, IndexError, ValueError):
        return peak_rss_bytes()


def peak_rss_bytes() -> int:
    """Largest resident memory so far, in bytes (``VmHWM``; elsewhere ``ru_maxrss``)."""
    try:
        for line in STATUS.read_bytes().splitlines():
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, IndexError, ValueError):
        pass
    return _rusage_peak()


def _rusage_peak() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
