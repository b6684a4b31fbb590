"""Which worker gets the next microbatch: turns in proportion to weights, credits, and weights from measured speeds.

The turns are the smooth weighted round robin of nginx (1.3.1, 2012): a heavy worker's turns are spread
out, not taken in a row. Weights 3:1 give a a b a; 5:1:1 give a a b a c a a.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping
from typing import Generic, TypeVar

from splitlm.core.errors import ProtocolError, UsageError

W = TypeVar("W", bound=Hashable)
"""Whatever names a worker."""
KEPT = 0.8
"""Share of the old speed in the new one."""
SLOWEST = 20
"""No weight is below that of the fastest worker divided by this: a slow one still gets work, and so is measured."""


class SmoothWRR(Generic[W]):
    """Turns in proportion to weights. The state lives as long as the object: windows do not begin anew.

    Args:
        weights: of each worker, above 0; where two are level, the one that comes first here wins.

    Raises:
        UsageError: no worker, or a weight that is not a positive number.
    """

    def __init__(self, weights: Mapping[W, float]) -> None:
        self._weights = _checked(weights)
        self._due = dict.fromkeys(self._weights, 0.0)

    @property
    def weights(self) -> dict[W, float]:
        """The weights in use (a copy)."""
        return dict(self._weights)

    def choose(self, eligible: Collection[W]) -> W | None:
        """Whose turn it is among these; None where there is nobody.

        A worker that is not eligible neither gains nor loses: it does not get a burst of work for the time it was
        full. The same object serves inbound frames, with those workers eligible whose frames wait.

        Raises:
            RuntimeError: a worker that has no weight.
        """
        if unknown := [worker for worker in eligible if worker not in self._weights]:
            raise RuntimeError(f"there is no weight for worker {unknown[0]!r}")
        able = [worker for worker in self._weights if worker in eligible]
        if not able:
            return None
        for worker in able:
            self._due[worker] += self._weights[worker]
        chosen = max(able, key=self._due.__getitem__)  # the first of equals
        self._due[chosen] -= sum(self._weights[worker] for worker in able)
        return chosen

    def reweigh(self, weights: Mapping[W, float]) -> None:
        """Take other weights. Who stays keeps its place in the order, counted in turns; who is not named is gone.

        Raises:
            UsageError: no worker, or a weight that is not a positive number.
        """
        new = _checked(weights)
        scale = sum(new.values()) / sum(self._weights.values())  # weights may come in another unit
        self._due = {worker: self._due.get(worker, 0.0) * scale for worker in new}
        self._weights = new


def credit(max_inflight: int, worker_max_inflight: int, owners: int) -> int:
    """How many microbatches of one owner may be live at one worker.

    Raises:
        UsageError: the settings leave an owner without any.
    """
    if owners < 1 or max_inflight < 1:
        raise UsageError(
            f"max-inflight is {max_inflight} with {owners} owners",
            where="learning.u-shape.max-inflight",
            expected="at least 1 of each",
        )
    if worker_max_inflight < owners:
        raise UsageError(
            f"worker-max-inflight is {worker_max_inflight} with {owners} owners",
            where="learning.u-shape.worker-max-inflight",
            expected=f"at least {owners}, one live microbatch per owner",
            remedy="Raise it, or have fewer owners",
        )
    return min(max_inflight, worker_max_inflight // owners)


class Credits(Generic[W]):
    """How many more microbatches one owner may send to each worker. A credit is taken per microbatch that goes out,
    and given back when its gradient has come home (in validation: when a message says so).

    Args:
        credits: of each worker, see ``credit``.

    Raises:
        RuntimeError: a worker has no credit at all.
    """

    def __init__(self, credits: Mapping[W, int]) -> None:
        if poor := [worker for worker, most in credits.items() if most < 1]:
            raise RuntimeError(f"worker {poor[0]!r} would never get work: its credit is {credits[poor[0]]}")
        self._most = dict(credits)
        self._live = dict.fromkeys(self._most, 0)

    def live(self, worker: W) -> int:
        """Microbatches that are out at a worker."""
        return self._live[worker]

    def left(self, worker: W) -> int:
        """Microbatches that may still go to a worker."""
        return self._most[worker] - self._live[worker]

    def eligible(self) -> list[W]:
        """The workers that can take one now."""
        return [worker for worker in self._most if self.left(worker) > 0]

    def take(self, worker: W) -> None:
        """A microbatch goes out.

        Raises:
            RuntimeError: the worker has no credit left, or is none of ours.
        """
        if worker not in self._most:
            raise RuntimeError(f"there is no worker {worker!r} to take a credit of")
        if self.left(worker) < 1:
            raise RuntimeError(f"worker {worker!r} has {self._most[worker]} of {self._most[worker]} credits out")
        self._live[worker] += 1

    def give_back(self, worker: W) -> None:
        """A microbatch is done.

        Raises:
            RuntimeError: none is out at this worker.
        """
        if not self._live.get(worker):
            raise RuntimeError(f"worker {worker!r} gives back a credit that was not taken")
        self._live[worker] -= 1

    def drop(self, worker: W) -> int:
        """Forget a worker that was lost; returns how many microbatches were out at it (0 for one not known)."""
        self._most.pop(worker, None)
        return self._live.pop(worker, 0)

    def clear(self) -> None:
        """Nothing is out any more: the window was dropped."""
        self._live = dict.fromkeys(self._most, 0)


class Speeds(Generic[W]):
    """Weights from what workers measured, in padded tokens per second of body forward and backward.

    Args:
        manual: ``--compute-weight`` of each worker.

    Raises:
        UsageError: no worker, or a weight that is not a positive number.
    """

    def __init__(self, manual: Mapping[W, float]) -> None:
        self._manual = _checked(manual)
        self._speeds: dict[W, float] = {}

    def report(self, worker: W, tokens_per_second: float) -> None:
        """Take a worker's measurement: the first one as it is, then ``0.8·old + 0.2·new``.

        Raises:
            ProtocolError: the worker is unknown, or says something that is not a positive number.
        """
        if worker not in self._manual or not 0 < tokens_per_second < math.inf:
            raise ProtocolError(
                f"The speed {tokens_per_second} was reported",
                where=f"worker {worker}",
                expected=f"a positive number of tokens per second, from one of {', '.join(map(str, self._manual))}",
            )
        old = self._speeds.get(worker, tokens_per_second)
        self._speeds[worker] = KEPT * old + (1 - KEPT) * tokens_per_second

    def weights(self) -> dict[W, float]:
        """Speeds once every worker has one, none below a twentieth of the fastest; the manual weights before."""
        if self._speeds.keys() != self._manual.keys():
            return dict(self._manual)
        floor = max(self._speeds.values()) / SLOWEST
        return {worker: max(self._speeds[worker], floor) for worker in self._manual}

    def drop(self, worker: W) -> None:
        """Forget a worker that was lost: the others need not wait for its measurement.

        Raises:
            RuntimeError: it was the last.
        """
        if self._manual.keys() == {worker}:
            raise RuntimeError(f"worker {worker!r} is the last one")
        self._manual.pop(worker, None)
        self._speeds.pop(worker, None)

    def new_round(self) -> None:
        """Back to the manual weights, until everyone has measured again."""
        self._speeds.clear()


def fair(weight: float) -> bool:
    """Whether work can be shared out by a weight: whether it is a positive number."""
    return 0 < weight < math.inf


def _checked(weights: Mapping[W, float]) -> dict[W, float]:
    if not weights:
        raise UsageError("There is no worker", where="clients", expected="at least one")
    for worker, weight in weights.items():
        if not fair(weight):
            raise UsageError(
                f"The weight of worker {worker} is {weight}", where="--compute-weight", expected="a positive number"
            )
    return dict(weights)
