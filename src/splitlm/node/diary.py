"""What a training run writes down of each window and round: rows, in their order, by a thread of its own.

The one who decides must not wait for a disk. A disk that is full costs the rows, and is said once.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from splitlm.core.errors import SplitlmError
from splitlm.finetune.store import RunFolder

_log = logging.getLogger("splitlm.train")


class Diary:
    """Rows go to the folder's metrics, and to whoever else wants them.

    Args:
        folder: an open one, which is closed with this; None keeps nothing.
        tell: takes each row at once, on the caller's thread.
    """

    def __init__(self, folder: RunFolder | None, tell: Callable[[str, dict[str, Any]], None] = lambda _, __: None):
        self._folder, self._tell, self._began = folder, tell, time.monotonic()
        self._rows: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="splitlm-diary", daemon=True)
        if folder is not None:
            self._thread.start()

    def record(self, kind: str, row: dict[str, Any]) -> None:
        """Keep one row: first its kind and the seconds since this was made, then its values."""
        self._tell(kind, row)
        if self._folder is not None:
            self._rows.put({"record": kind, "seconds": round(time.monotonic() - self._began, 3), **row})

    def close(self) -> None:
        """Wait until all is written, and let another process have the folder."""
        if self._folder is None:
            return
        if self._thread.is_alive():
            self._rows.put(None)
            self._thread.join()
        self._folder.close()

    def _write(self) -> None:
        folder, lost = self._folder, 0
        while (row := self._rows.get()) is not None and folder is not None:
            try:
                folder.metrics(row)
            except SplitlmError as error:
                if not lost:
                    _log.warning("The metrics cannot be written: %s", error)
                lost += 1
        if lost:
            _log.warning("%d rows of metrics were not written", lost)
