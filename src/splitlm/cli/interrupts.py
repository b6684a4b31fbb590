"""Ctrl-C and SIGTERM: both end a run in order, whatever it is doing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Makes SIGINT and SIGTERM raise ``KeyboardInterrupt``, and remembers it.

    Libraries that are interrupted sometimes report it as an error of another kind; who remembers knows better.
    """

    def __init__(self) -> None:
        self.came = False

    def install(self) -> None:
        """Take over both signals. To be called in the main thread."""
        signal.signal(signal.SIGINT, self._interrupt)
        signal.signal(signal.SIGTERM, _like_interrupt)

    def _interrupt(self, _: int, __: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt


def _like_interrupt(_: int, __: FrameType | None) -> None:
    """Whoever handles SIGINT now (an asyncio loop does it in its own way) gets this one too."""
    signal.raise_signal(signal.SIGINT)


@contextmanager
def held() -> Iterator[None]:
    """Let an interrupt wait until the block is done. For imports: a half-imported library swallows it, or worse."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: waiting.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting and callable(before):
            before(*waiting[0])
