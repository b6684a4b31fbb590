"""A party's compute: whether it is at work, and its errors in our words.

What torch raises in a forward, a backward or a step is one of many classes, and its text may quote values. Others
are told the class and the place; the party's own log has the whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from splitlm.core.errors import ModelError, NetworkError, SplitlmError
from splitlm.model.border import FOREIGN
from splitlm.model.runner import out_of_memory

HUNG = 10
"""How many times ``timeout-seconds`` a computation may take before it is taken for one that never ends."""
LOOKS = 0.05
"""Part of that time after which is looked again."""
_log = logging.getLogger("splitlm.train")
T = TypeVar("T")
_CAUGHT: tuple[type[Exception], ...] = (MemoryError, *FOREIGN)


class Runs(Protocol):
    """What runs jobs one after the other, as ``model.runner.Runner`` does."""

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """The result of ``work(*args)``, or the error it raised."""
        ...


@contextlib.contextmanager
def computing(what: str, where: Callable[[], str]) -> Iterator[None]:
    """Turn an error of torch into ours; our own pass.

    Args:
        what: what is computed: the middle of a sentence.
        where: asked for the party, and its window, when something failed.

    Raises:
        SplitlmError: memory ran out.
        ModelError: any other error; it names the class.
    """
    try:
        yield
    except _CAUGHT as error:
        place = where()
        _log.error("%s: %s failed", place, what, exc_info=error)
        if out_of_memory(error) is not None:
            raise SplitlmError(
                f"Memory ran out in {what} ({type(error).__name__})",
                where=place,
                expected="room for the weights, the optimizer and the microbatches that are live at once",
                remedy="Use a smaller learning.batch-size or max-inflight, or more workers",
            ) from error
        raise ModelError(
            f"Computing {what} failed with {type(error).__name__}",
            where=place,
            expected="a model and rows that fit each other",
            remedy=f"The log of {place.partition(',')[0]} has the whole error",
        ) from error


class Compute:
    """One party's way to its compute thread.

    Args:
        runner: the thread, or a party's way to it; it stays the caller's.
        where: the party, for people.

    Attributes:
        where: tells the party, and its window where one is known.
        jobs: how many were done.
    """

    def __init__(self, runner: Runs, where: str) -> None:
        self._runner = runner
        self.where: Callable[[], str] = lambda: where
        self.jobs = 0
        self._open = 0
        self._since: float | None = None

    @property
    def busy(self) -> bool:
        """Whether a job is at hand."""
        return self._open > 0

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Run ``work(*args)`` on the compute thread.

        Raises:
            ModelError: an error of torch. Otherwise as ``computing`` and ``Runner.run``.
        """
        self._open += 1
        try:
            return await self._runner.run(self._worded, work, args)
        finally:
            self._open -= 1
            self.jobs += 1

    async def watch(self, longest_s: float) -> None:
        """Wait for a job that does not end: who computes for ever is at work to all others, who wait for it.

        Args:
            longest_s: how long one job may take, from when the thread begins it.

        Raises:
            NetworkError: one took longer. Others can do without this party, so it is as one that is lost.
        """
        while True:
            await asyncio.sleep(longest_s * LOOKS)
            since = self._since
            if since is not None and time.monotonic() - since > longest_s:
                raise NetworkError(
                    f"A computation has not ended in {longest_s:g} s, and is taken for hung",
                    where=self.where(),
                    expected=f"the end of a forward, a backward or a step within {HUNG} times timeout-seconds",
                    remedy="Look at its device, or raise learning.u-shape.timeout-seconds",
                )

    def _worded(self, work: Callable[..., T], args: tuple[Any, ...]) -> T:
        """On the compute thread, before it says in the words of a ring that memory ran out."""
        self._since = time.monotonic()
        try:
            with computing("its part", lambda: self.where()):
                return work(*args)
        finally:
            self._since = None
