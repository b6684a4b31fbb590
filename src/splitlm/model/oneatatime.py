"""Where transformers builds a model it sets torch's default element type for the whole process, and sets it back.

Two threads that did so at once could leave the one's type behind for everybody: parties of one process load models too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_BUILDING = threading.RLock()


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """For a call of ``from_config`` or ``from_pretrained`` of a model: no other thread of ours is in one."""
    with _BUILDING:
        yield
