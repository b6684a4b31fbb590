"""A training run whose turns are its rounds: the coordinator and the aggregator here, every party a child process.

Between two rounds the run waits for its next turn; the control plane's heartbeats go on meanwhile.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import splitlm
from splitlm.bench.arm import Arm
from splitlm.bench.trainparty import DEADLINE_S, rss_kib
from splitlm.coordinator.members import Who
from splitlm.coordinator.orders import Orders
from splitlm.coordinator.training import Training
from splitlm.core import training
from splitlm.core.config import read, resolved
from splitlm.core.errors import SplitlmError
from splitlm.link import tcp
from splitlm.model.runner import Runner
from splitlm.node.aggregator import StateHub
from splitlm.node.guard import Guard
from splitlm.node.identity import node_name
from splitlm.node.trainbus import open_star
from splitlm.wire.frame import PROTOCOL
from splitlm.wire.handshake import Claims, Identity

ENDLESS = 1_000_000
"""Rounds: the bench ends the run."""


@dataclass
class Turn:
    """What one round was like.

    Attributes:
        begun: when it began, in seconds.
        ended: when all owners were through their rows.
        saved: when all had taken the average.
        stamps: when a party had stepped: window, time, items of an owner's loss (which are rows here).
    """

    begun: float = 0.0
    ended: float = 0.0
    saved: float = 0.0
    stamps: list[tuple[int, float, int]] = field(default_factory=list)

    def told(self) -> dict[str, Any]:
        """As JSON. ``steady``: rows and seconds of all windows but the first."""
        first, last = (max(at for window, at, _ in self.stamps if window == w) for w in (0, self.stamps[-1][0]))
        rows = sum(items for _, _, items in self.stamps)
        return {
            "rows": rows,
            "seconds": self.ended - self.begun,
            "average": self.saved - self.ended,
            "steady": [sum(items for window, _, items in self.stamps if window), last - first],
        }


class Gate(StateHub):
    """An aggregator that lets a round end only when the next turn begins."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._go, self.over = asyncio.Event(), asyncio.Event()
        self.turn = Turn(begun=time.perf_counter())
        self.rss: list[float] = []

    def begin_turn(self) -> None:
        """Let the next round begin."""
        self.over.clear()
        self.turn = Turn(begun=time.perf_counter())
        self._go.set()

    def record(self, kind: str, row: dict[str, Any]) -> None:
        """Takes what the coordinator records."""
        if kind == "window":
            self.turn.stamps.append((row["window"], time.perf_counter(), row["items"]))

    async def begin(self, round_: int, members: list[Who]) -> None:
        """All owners are through their rows."""
        self.turn.ended = time.perf_counter()
        await super().begin(round_, members)

    async def complete(self, round_: int, saved: dict[Who, training.Saved]) -> Any:
        """All have the average: the turn is over."""
        counted: Any = await super().complete(round_, saved)
        self.turn.saved = time.perf_counter()
        self.rss.append(rss_kib())
        self.over.set()
        await self._go.wait()
        self._go.clear()
        return counted


class TrainWork:
    """A run with one owner. Its first round is the way to being ready.

    Args:
        config: of the run, as a mapping.
        cores: of each party, the owner's first; None leaves them free.
        paces: of each worker in ms, see ``PartyWork``.
    """

    def __init__(
        self, *, config: dict[str, Any], cores: list[int] | None = None, paces: list[float] | None = None
    ) -> None:
        self._config = read(config, "the bench's settings")
        self._token = secrets.token_hex(16)
        workers = self._config.server.workers
        pins: list[int | None] = [None] * (1 + workers) if cores is None else [*cores]
        self._stack = ExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="splitlm-bench-loop", daemon=True)
        self._thread.start()
        self._runner = Runner(background=True)
        try:
            self._parties = [
                self._stack.enter_context(
                    Arm(
                        "train-party",
                        role="owner" if i == 0 else "worker",
                        config=config,
                        core=core,
                        pace_ms=0.0 if i == 0 or paces is None else paces[i - 1],
                    )
                )
                for i, core in enumerate(pins)
            ]
            self._call(self._open())
            for party in self._parties:
                party.ask(port=self._hub_port, token=self._token)
            self._call(self._over())
        except BaseException:
            self.close()
            raise
        self.told: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """One round."""
        took: dict[str, Any] = self._call(self._turn())
        return took

    def finish(self) -> dict[str, Any]:
        """End the run; what each party says of it, the owner first, and this process's own memory."""
        self._call(self._shut())
        return {"parties": [party.answer() for party in self._parties], "rss": self._gate.rss}

    def close(self) -> None:
        """End everything."""
        if not self._loop.is_closed():
            self._call(self._shut())
            self._stack.close()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10.0)
            self._loop.close()
            self._runner.close()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self) -> None:
        server, run = self._config.server, secrets.token_hex(8)
        ports: list[int] = []
        here = ("127.0.0.1", 0)
        self._hub = await open_star(node_name("coordinator"), here, self._token, Guard(), False, ports.append)
        self._hub_port = ports[0]
        claims = Claims(
            node="the aggregator", version=splitlm.__version__, protocol=PROTOCOL, ring=run, role="aggregator"
        )
        door = await tcp.listen(*here, Identity(claims, self._token), "state", expect_peer="a party")
        self._failed: asyncio.Future[SplitlmError] = asyncio.get_running_loop().create_future()
        self._gate = Gate(door, self._runner, None, "factors", self._fail)
        orders = Orders(
            shape=self._config.shape,
            owners=server.owners,
            workers=server.workers,
            rounds=ENDLESS,
            settings=resolved(self._config),
            run=run,
            aggregator=("127.0.0.1", door.port),
            deadline_s=DEADLINE_S,
            timeout_s=DEADLINE_S,
        )
        self._work = asyncio.create_task(Training(self._hub, orders, self._gate, record=self._gate.record).run())

    def _fail(self, error: SplitlmError) -> None:
        if not self._failed.done():
            self._failed.set_result(error)

    async def _turn(self) -> dict[str, Any]:
        self._gate.begin_turn()
        await self._over()
        return self._gate.turn.told()

    async def _over(self) -> None:
        """Wait until the round is over.

        Raises:
            SplitlmError: the run failed.
        """
        over = asyncio.create_task(self._gate.over.wait())
        try:
            ends: set[asyncio.Future[Any]] = {over, self._work, self._failed}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                raise self._failed.result()
            if self._work.done():
                self._work.result()
        finally:
            over.cancel()

    async def _shut(self) -> None:
        if not hasattr(self, "_work"):
            return
        self._work.cancel()
        await asyncio.gather(self._work, return_exceptions=True)
        await self._gate.close()
        await self._hub.close()
