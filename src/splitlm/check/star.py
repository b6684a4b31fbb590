"""A head without a model and its stand-in stages, as processes of this machine: the control plane alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

import splitlm
from splitlm.bus.base import PeerCame, PeerGone
from splitlm.bus.star import StarHub
from splitlm.check.stand_in import CONNECT_S, PEER, LastWord, Part
from splitlm.coordinator.coordinator import Coordinator
from splitlm.core import messages as m
from splitlm.core.cut import Cut
from splitlm.core.errors import NetworkError, PeerLostError, PeerMissingError
from splitlm.link import tcp
from splitlm.node.follower import Follower
from splitlm.node.package import own_package
from splitlm.wire.frame import PROTOCOL
from splitlm.wire.handshake import Claims, Identity

EXIT_S = 3.0
"""How long a stage may take to leave after it was told to."""


class Ending(msgspec.Struct, frozen=True):
    """How one stand-in ended: exit code (negative: by a signal), and its last word if it had one."""

    node: int
    code: int
    last: LastWord | None
    seconds: float


class Star:
    """A hub, its stages, and a coordinator. Made by ``star``."""

    def __init__(self, hub: StarHub, cut: Cut, ctrl_timeout_s: float) -> None:
        self.hub = hub
        self.came: dict[int, str] = {}
        self.prepared: set[int] = set()
        self.changed = asyncio.Event()
        self.processes: dict[int, asyncio.subprocess.Process] = {}
        self._words: dict[int, asyncio.Task[tuple[bytes, float]]] = {}
        self.coordinator = Coordinator(self.send, range(cut.stages), cut=cut, ctrl_timeout_s=ctrl_timeout_s)
        self._tasks: list[asyncio.Task[None]] = []
        self.own = Follower(self._say, _Nothing(), epoch=cut.epoch, ctrl_timeout_s=ctrl_timeout_s)

    async def send(self, node: int, message: m.Message) -> None:
        """Say something to a stage, or to the head's own."""
        if node == 0:
            self.own.hear(m.decode(m.encode(message)))
        elif node in self.came:
            await self.hub.send(self.came[node], message)
        else:
            raise PeerLostError(f"Node {node} never came")

    async def _say(self, message: m.Message) -> None:
        self.coordinator.hear(0, m.decode(m.encode(message)))

    async def start(self, part: Part) -> None:
        """Start one stage."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "splitlm.check.stand_in",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **own_package()},
        )
        self.processes[part.node] = process
        self._words[part.node] = asyncio.create_task(self._converse(process, msgspec.json.encode(part) + b"\n"))

    async def _converse(self, process: asyncio.subprocess.Process, line: bytes) -> tuple[bytes, float]:
        said, _ = await process.communicate(line)
        return said, time.monotonic()

    async def _listen(self) -> None:
        nodes: dict[str, int] = {}
        while True:
            peer, event = await self.hub.receive()
            match event:
                case PeerCame(name=name):
                    nodes[peer] = int(name.removeprefix(PEER))
                    self.came[nodes[peer]] = peer
                case PeerGone(reason=reason):
                    self.coordinator.lost(nodes[peer], reason)
                case _:
                    if isinstance(event, m.Prepared):
                        self.prepared.add(nodes[peer])
                    self.coordinator.hear(nodes[peer], event)
            self.changed.set()

    async def until(self, what: str, done: Sequence[int], among: dict[int, str] | set[int], timeout: float) -> None:
        """Wait until these nodes are there.

        Raises:
            PeerMissingError: they did not come in time.
        """
        try:
            async with asyncio.timeout(timeout):
                while not set(done) <= set(among):
                    await self.changed.wait()
                    self.changed.clear()
        except TimeoutError:
            missing = sorted(set(done) - set(among))
            raise PeerMissingError(f"Node {missing[0]} did not {what} in {timeout:g} s") from None

    async def dismiss(self) -> None:
        """Tell every stage to leave."""
        for node in self.came:
            with contextlib.suppress(NetworkError):
                await self.send(node, m.Stop())

    def begin(self) -> None:
        """Hear the stages, and follow with the head's own."""
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self.own.run())]

    async def vanish(self) -> None:
        """Part from all stages, as a head that was killed does."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        await self.hub.close()
        for error in ends:
            if isinstance(error, Exception):
                raise error

    async def endings(self, since: float, *, kill: Sequence[int] = (), timeout: float = EXIT_S) -> list[Ending]:
        """Wait for the end of every stage; those in ``kill``, and those that do not leave in time, are killed.

        Args:
            since: the moment (``time.monotonic``) from which their seconds count.
            timeout: seconds that they have to leave.
        """
        for node in kill:
            self._kill(node)
        if self._words:
            await asyncio.wait(self._words.values(), timeout=timeout)
        for node in self.processes:
            self._kill(node)
        endings = []
        for node, task in sorted(self._words.items()):
            said, when = await task
            last = msgspec.json.decode(said, type=LastWord) if said else None
            endings.append(Ending(node, self.processes[node].returncode or 0, last, when - since))
        return endings

    def _kill(self, node: int) -> None:
        if self.processes[node].returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.processes[node].kill()


class _Nothing:
    """The head's own stage: always ready, nothing to hold (``Work``, node/follower.py)."""

    async def announced(self, cut: Cut) -> None:
        """Nothing."""

    async def prepare(self, prepare: m.Prepare) -> None:
        """Nothing."""

    async def commit(self, cut: Cut | None) -> None:
        """Nothing."""

    async def abort(self) -> None:
        """Nothing."""

    async def finish(self) -> None:
        """Nothing."""


@asynccontextmanager
async def star(cut: Cut, ctrl_timeout_s: float, **changes: dict[str, Any]) -> AsyncIterator[Star]:
    """A head and the stages of a cut, all joined; nothing is left of them afterwards.

    Args:
        cut: the one that serves at first.
        ctrl_timeout_s: of head and stages.
        changes: ``node2={...}`` changes fields of node 2's ``Part``.

    Raises:
        PeerMissingError: a stage did not join in time.
    """
    token = secrets.token_hex(16)
    claims = Claims(node="check control", version=splitlm.__version__, protocol=PROTOCOL)
    listener = await tcp.listen("127.0.0.1", 0, Identity(claims, token), "control", expect_peer="a stage")
    hub = StarHub(listener)
    made = Star(hub, cut, ctrl_timeout_s)
    made.begin()
    try:
        for node in range(1, cut.stages):
            part = Part(node=node, port=listener.port, token=token, cut=cut, ctrl_timeout_s=ctrl_timeout_s)
            await made.start(msgspec.structs.replace(part, **changes.get(f"node{node}", {})))
        await made.until("join", range(1, cut.stages), made.came, CONNECT_S)
        yield made
    finally:
        try:
            await made.dismiss()
            await made.endings(time.monotonic())
        finally:
            await made.vanish()
