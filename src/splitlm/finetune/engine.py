"""One party's windows: what arrives is computed and sent on, backward before forward, new work only with credit.

The data plane and the compute thread meet here. A window that is over, or was aborted, leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from splitlm.core.errors import ProtocolError
from splitlm.finetune.batch import Microbatch
from splitlm.finetune.compute import Runs, computing
from splitlm.finetune.crossing import Crossing
from splitlm.finetune.party import Party
from splitlm.finetune.plane import LinkLostError, Neighbour, Plane
from splitlm.finetune.window import Out, WindowScale
from splitlm.model.tuned import Key
from splitlm.planner.routing import Credits
from splitlm.wire.frame import AnyHeader, Backward, Forward, Frame, Scored


@dataclass(frozen=True)
class WindowPlan:
    """What a window is to a party.

    Attributes:
        seq: of the attempt; frames carry it.
        round: of the run.
        number: of the window in the round.
        order: the microbatches that will come here, in the order of their sum.
        scale: of the loss.
        batches: an owner's own, by index.
        assign: the worker of each of them.
        credit: live microbatches per worker.
        inflight: live microbatches of this owner, over all workers.
        train: False in validation: forward only.
    """

    seq: int
    round: int
    number: int
    order: Sequence[Key] = ()
    scale: WindowScale = field(default_factory=WindowScale)
    batches: Sequence[Microbatch] = ()
    assign: Sequence[int] = ()
    credit: int = 1
    inflight: int = 1
    train: bool = True


class Engine:
    """Runs one party's compute over its links.

    Args:
        party: what computes.
        plane: its links.
        runner: its compute thread.
        timeout_s: how long an owner waits while no worker is at work.
        crossing: what tensors pass on their way in and out; by default the CPU's.

    Attributes:
        peak_live: most graphs that were kept at once.
        compute_s: seconds of forwards and backwards.
        wait_s: seconds in which there was nothing to compute, since nothing had come.
    """

    def __init__(
        self,
        party: Party,
        plane: Plane,
        runner: Runs,
        timeout_s: float = 120.0,
        crossing: Crossing | None = None,
    ) -> None:
        self._party, self._plane, self._runner, self._timeout_s = party, plane, runner, timeout_s
        self._crossing = crossing or Crossing(party.role)
        self._held: list[tuple[Neighbour, Frame]] = []
        self._number = 0
        self._limit: asyncio.Timeout | None = None
        self.peak_live = 0
        self.compute_s = self.wait_s = 0.0

    async def window(self, plan: WindowPlan) -> None:
        """Take part in a window until all that is to come here came; its gradients are complete and finite then.

        Args:
            plan: what it is to this party.

        Raises:
            ModelError: a loss, hidden state or gradient is not finite; party, window and microbatch are named.
            LinkLostError: nothing came of a worker for too long, and none was at work.
            ProtocolError: a frame that has no place in it.
        """
        party, self._number = self._party, plan.number
        await self._runner.run(
            lambda: party.open(plan.round, plan.number, plan.seq, plan.order, plan.scale, train=plan.train)
        )
        owner = _Owner(plan) if party.role == "owner" else None
        expected = len(plan.order)
        came = 0
        while came < expected:
            if (arrival := self._next((plan.round, plan.seq))) is not None:
                who, frame = arrival
                home = await self._take(who, frame)
                if owner is not None and home is not None:
                    owner.home(home)
                came += home is not None
            elif owner is not None and (index := owner.next()) is not None:
                out = await self._runner.run(self._begin, index, plan.batches[index])
                await self._plane.send((out.role, plan.assign[index]), out)
            else:
                await self._wait(plan, owner)
            self.peak_live = max(self.peak_live, party.live)
        await self._runner.run(party.check)

    def alive(self) -> None:
        """A worker is at work: an owner that waits does so anew."""
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + self._timeout_s)

    async def serve(self) -> None:
        """Answer whatever comes, for ever: a party that steps after every microbatch."""
        while True:
            arrival = self._next(None)
            if arrival is None:
                await self._arrived()
            else:
                await self._take(*arrival)
                self.peak_live = max(self.peak_live, self._party.live)

    async def drop(self) -> None:
        """The window was aborted: forget it, and what came for it."""
        await self._runner.run(self._party.drop)

    def _next(self, now: tuple[int, int] | None) -> tuple[Neighbour, Frame] | None:
        """The next frame of this round's attempt. Older ones are dropped; newer ones wait for their window to open."""
        if now is not None:
            for i, (_, frame) in enumerate(self._held):
                if _when(frame) <= now:
                    who, frame = self._held.pop(i)
                    if _when(frame) == now:
                        return who, frame
                    frame.release()
                    return self._next(now)
        while (arrival := self._plane.next()) is not None:
            found = _when(arrival[1])
            if now is None or found == now:
                return arrival
            if found > now:
                self._held.append(arrival)
            else:
                arrival[1].release()
        return None

    async def _wait(self, plan: WindowPlan, owner: _Owner | None) -> None:
        """A worker waits as long as it takes: an owner that sends nothing may be waiting for another worker."""
        try:
            async with asyncio.timeout(self._timeout_s if owner is not None else None) as self._limit:
                await self._arrived()
        except TimeoutError:
            silent = owner.awaited() if owner is not None else 0
            raise LinkLostError(
                ("worker", silent),
                f"{self._party.name} heard nothing of it for {self._timeout_s:g} s in window {plan.number} "
                f"of round {plan.round}; learning.u-shape.timeout-seconds is this limit",
            ) from None
        finally:
            self._limit = None

    async def _take(self, who: Neighbour, frame: Frame) -> Key | None:
        """Compute what came; the microbatch that is done here because of it, if one is."""
        header = frame.header
        outs, home = await self._runner.run(self._compute, who, frame)
        for out in outs:
            await self._plane.send((out.role, out.to if out.to >= 0 else who[1]), out)
        if self._party.every_batch:
            await self._runner.run(self._party.settle)
        if isinstance(header, Forward | Backward | Scored):
            return home
        raise ProtocolError(f"A {type(header).__name__} frame came from {who[0]} {who[1]}", expected="Forward")

    async def _arrived(self) -> None:
        """Wait for a frame, and count for how long."""
        started = time.perf_counter()
        try:
            await self._plane.arrived()
        finally:
            self.wait_s += time.perf_counter() - started

    def _begin(self, index: int, batch: Microbatch) -> Out:
        """On the compute thread: an owner's next microbatch."""
        started = time.perf_counter()
        with computing(f"microbatch {index} of {self._party.name}", lambda: self._party.place):
            out = self._crossing.leave(self._party.begin(index, self._crossing.own(batch)), self._number)
        self.compute_s += time.perf_counter() - started
        return out

    def _compute(self, who: Neighbour, frame: Frame) -> tuple[list[Out], Key | None]:
        """On the compute thread: what came is copied out of the frame's buffers, which go back at once."""
        started, header = time.perf_counter(), frame.header
        what = (
            f"microbatch {header.index} of owner {header.owner}"
            if isinstance(header, Forward | Backward)
            else "a score"
        )
        with computing(what, lambda: self._party.place):
            try:
                tensors = [
                    self._crossing.take(spec, view) for spec, view in zip(header.tensors, frame.tensors, strict=True)
                ]
            finally:
                frame.release()
            outs, home = self._answer(who, header, tensors)
            outs = [self._crossing.leave(out, self._number) for out in outs]
        self.compute_s += time.perf_counter() - started
        return outs, home

    def _answer(self, who: Neighbour, header: AnyHeader, tensors: list[Tensor]) -> tuple[list[Out], Key | None]:
        party = self._party
        match header:
            case Forward():
                self._check_owner(who, header.owner)
                outs = party.take_forward(header, tensors)
                return outs or [], self._done(header, outs, header.part)
            case Backward() if len(tensors) == 1:
                self._check_owner(who, header.owner)
                outs = party.take_backward(header, tensors[0])
                return outs or [], self._done(header, outs, header.part)
            case Scored():
                # In training the microbatch is done with its gradient; in validation nothing else comes of it.
                last = party.add(header) and not party.window.train
                return [], (header.owner, header.index) if last else None
            case other:
                raise ProtocolError(
                    f"A {type(other).__name__} frame with {len(tensors)} tensors came", where=f"{who[0]} {who[1]}"
                )

    def _done(self, header: Forward | Backward, outs: list[Out] | None, part: int) -> Key | None:
        """A microbatch is done here when its gradient left this party's first part; in validation, its last part."""
        if outs is None:
            return None
        if isinstance(header, Forward) and not header.train:
            return (header.owner, header.index) if part == max(self._party.parts) else None
        first = min(self._party.parts)
        left = isinstance(header, Backward) and part == first
        turned = isinstance(header, Forward) and part == first and any(isinstance(o.header, Backward) for o in outs)
        return (header.owner, header.index) if left or turned else None

    def _check_owner(self, who: Neighbour, owner: int) -> None:
        if who[0] == "owner" and who[1] != owner:
            raise ProtocolError(
                f"A microbatch of owner {owner} came", where=f"{who[0]} {who[1]}", expected="the sender's own"
            )


class _Owner:
    """Which microbatch an owner begins next: in the order of their indices, past workers whose credit is used up."""

    def __init__(self, plan: WindowPlan) -> None:
        self._plan = plan
        self._live = 0
        workers = dict.fromkeys(plan.assign)
        self._credits = Credits(dict.fromkeys(workers, plan.credit))
        self._waiting = {worker: deque(i for i, w in enumerate(plan.assign) if w == worker) for worker in workers}

    def next(self) -> int | None:
        """One that may go out now; it counts as out."""
        able = [w for w in self._credits.eligible() if self._waiting[w]]
        if not able or self._live >= self._plan.inflight:
            return None
        self._live += 1
        worker = min(able, key=lambda w: self._waiting[w][0])
        self._credits.take(worker)
        return self._waiting[worker].popleft()

    def awaited(self) -> int:
        """A worker that has a microbatch of ours."""
        return next(worker for worker in self._waiting if self._credits.live(worker))

    def home(self, key: Key) -> None:
        """One is done."""
        self._live -= 1
        self._credits.give_back(self._plan.assign[key[1]])


def _when(frame: Frame) -> tuple[int, int]:
    """Round and attempt: where nothing is agreed, every round counts its windows anew."""
    header = frame.header
    return (header.round, header.window) if isinstance(header, Forward | Backward | Scored) else (0, 0)
