"""The process's one generator of random numbers: who seeds it keeps it until the numbers are drawn.

Dropout and the initialisation of modules draw from it, and take no other. Threads of one process take turns.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

GENERATOR = threading.RLock()
"""Held from the seeding to the last draw that depends on it."""


@contextlib.contextmanager
def draws_apart(seed: int | None = None) -> Iterator[None]:
    """What is drawn inside changes nothing of what is drawn outside.

    Args:
        seed: of what is drawn inside; None leaves it to chance.
    """
    with GENERATOR, torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        yield
