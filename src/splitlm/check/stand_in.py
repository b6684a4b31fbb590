"""A stage without a model, as a process of its own: ``python -m splitlm.check.stand_in``, its part as JSON on stdin.

It follows barriers over TCP like a real stage, holds a cut instead of blocks, and may be told to refuse, to be slow, or
to be killed or frozen by a signal in a given state. On its end it writes what became of it as JSON to stdout.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from statistics import median

import msgspec

import splitlm
from splitlm.bus.star import StarSpoke
from splitlm.core import messages as m
from splitlm.core.cut import Cut
from splitlm.core.errors import NetworkError, SplitlmError, UsageError
from splitlm.core.groups import first_error
from splitlm.link import tcp
from splitlm.node.follower import Follower
from splitlm.telemetry.record import Window
from splitlm.wire.frame import PROTOCOL
from splitlm.wire.handshake import Claims, Identity

CONNECT_S = 20.0
PEER = "stage "
"""A stand-in calls itself this and its number."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What a stand-in is to play.

    Attributes:
        node: its number.
        port: of the head's control plane, on this machine.
        token: join secret.
        cut: the one that serves at first.
        ctrl_timeout_s: the follower's.
        refuse: barrier that it refuses; 0 for none.
        slow: barrier for which it never gets ready; 0 for none.
        end_at: barrier in which it meets its end; 0 for none.
        end_in: the state in which it does: ``preparing``, ``prepared``, ``committed`` or ``idle`` (after DONE).
        end_by: the signal that it sends itself.
    """

    node: int
    port: int
    token: str
    cut: Cut
    ctrl_timeout_s: float
    refuse: int = 0
    slow: int = 0
    end_at: int = 0
    end_in: str = ""
    end_by: int = int(signal.SIGKILL)


class LastWord(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a stand-in.

    Attributes:
        where: the follower's state at the end.
        cut: the one it held.
        barriers: how many it saw to their end.
        aborted: how many of them were aborted.
        p50_ms: median of those that were not: the protocol alone.
        error: why it stopped; empty when the head said so.
    """

    where: str
    cut: Cut
    barriers: int
    aborted: int
    p50_ms: float | None
    error: str = ""


class StandIn:
    """The ``Work`` (node/follower.py) of a stage without blocks, and its life in the star."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._cut, self._staged = part.cut, part.cut
        self._windows: list[Window] = []
        self._seq = 0

    async def announced(self, cut: Cut) -> None:
        """Nothing to bring."""
        self._staged = cut

    async def prepare(self, prepare: m.Prepare) -> None:
        """Refuse, dawdle or end when the part says so."""
        self._seq = prepare.seq
        self._end("preparing")
        if prepare.seq == self._part.refuse:
            raise UsageError("This stage was told to refuse")
        if prepare.seq == self._part.slow:
            await asyncio.Event().wait()

    async def commit(self, cut: Cut | None) -> None:
        """Hold the new cut."""
        self._end("committed")
        self._cut = cut or self._cut

    async def abort(self) -> None:
        """Hold the old cut."""
        self._staged = self._cut

    async def finish(self) -> None:
        """Nothing to release."""

    def _end(self, state: str) -> None:
        if (self._seq, state) == (self._part.end_at, self._part.end_in):
            os.kill(os.getpid(), self._part.end_by)

    async def live(self) -> LastWord:
        """Join the head and follow it to the end; an error is part of the answer."""
        part = self._part
        claims = Claims(node=f"{PEER}{part.node}", version=splitlm.__version__, protocol=PROTOCOL)
        channel = await tcp.connect(
            "127.0.0.1", part.port, Identity(claims, part.token), "control", deadline_s=CONNECT_S, who="the head"
        )
        spoke = StarSpoke(channel)

        async def say(message: m.Message) -> None:
            await spoke.send(message)
            if isinstance(message, m.Prepared):
                self._end("prepared")
            elif isinstance(message, m.Done):
                self._end("idle")

        follower = Follower(
            say,
            self,
            node=part.node,
            epoch=part.cut.epoch,
            ctrl_timeout_s=part.ctrl_timeout_s,
            record=self._windows.append,
        )
        error = ""
        try:
            async with asyncio.TaskGroup() as group:
                running = group.create_task(follower.run())
                group.create_task(self._listen(spoke, follower, running))
        except* SplitlmError as errors:
            error = str(first_error(errors))
        finally:
            await spoke.close()
        times = [window.barrier_ms for window in self._windows if not window.aborted]
        return LastWord(
            where=follower.state.where,
            cut=self._cut,
            barriers=len(self._windows),
            aborted=sum(window.aborted for window in self._windows),
            p50_ms=median(times) if times else None,
            error=error,
        )

    async def _listen(self, spoke: StarSpoke, follower: Follower, running: asyncio.Task[None]) -> None:
        while True:
            try:
                message = await spoke.receive()
            except NetworkError as error:
                follower.lost(str(error))
                return
            if isinstance(message, m.Stop):
                running.cancel()
                return
            follower.hear(message)


def main() -> None:
    """Play the part that stdin brings."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the head, which then ends its stages
    part = msgspec.json.decode(sys.stdin.buffer.readline(), type=Part)
    last = asyncio.run(StandIn(part).live())
    sys.stdout.buffer.write(msgspec.json.encode(last))
    sys.exit(NetworkError.exit_code if last.error else 0)


if __name__ == "__main__":
    main()
