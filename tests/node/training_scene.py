"""Whole runs in this process whose parties can be killed, cut off or listened to at any message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from splitlm.bus.base import PeerGone
from splitlm.bus.memory import MemoryHub
from splitlm.core import training
from splitlm.core.config import RunConfig
from splitlm.core.errors import NetworkError, SplitlmError
from splitlm.finetune.plane import Plane
from splitlm.finetune.store import RunFolder
from splitlm.model.runner import Runner
from splitlm.node import party as party_module
from splitlm.node.keeper import identity
from splitlm.node.party import PartySettings, run_party
from splitlm.node.partylinks import LinkSettings
from splitlm.node.trainlead import LeadSettings, lead

DEADLINE_S = 20.0
"""How long the coordinator waits for parties."""
Who = tuple[str, int]
Strike = Callable[["Scene", str, Who, Any], None]
"""Called with every message of the control plane before it is delivered: ``to`` or ``from`` which party, and what."""


class ScenicHub(MemoryHub):
    """Tells of every message."""

    scene: Scene

    async def send(self, peer: str, message: Any) -> None:
        if peer in self.scene.silent:
            return
        if isinstance(message, training.Start):
            self.scene.peers[self.scene.roles[peer], message.party] = peer
        self.scene.struck("to", peer, message)
        await super().send(peer, message)

    def tell(self, peer: str, event: Any) -> None:
        if peer in self.scene.silent and not isinstance(event, PeerGone):
            return  # the dead say nothing
        super().tell(peer, event)
        self.scene.struck("from", peer, event)


@dataclass
class Scene:
    """One run.

    Attributes:
        strike: see ``Strike``.
        folder: of the run.
        pace_ms: of its workers.
        folders: of parties that have one of their own, in the order in which they are started.
        data: rows that are all a party's own.
        threads: whether each party has a compute thread of its own.
        error: what it ended with.
        ends: what parties ended with that were not killed, by role and number.
        errors: the same of all parties, also of those that were given no number.
        rows: what was recorded.
        said: lines of progress.
    """

    strike: Strike
    folder: Path
    pace_ms: float = 0.0
    folders: dict[Who, Path] = field(default_factory=dict)
    data: dict[Who, Path] = field(default_factory=dict)
    threads: bool = False
    error: SplitlmError | None = None
    ends: dict[Who, SplitlmError | None] = field(default_factory=dict)
    errors: list[SplitlmError] = field(default_factory=list)
    rows: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    roles: dict[str, str] = field(default_factory=dict)
    peers: dict[Who, str] = field(default_factory=dict)
    planes: dict[Who, Plane] = field(default_factory=dict)
    killed: set[Who] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    _spokes: dict[str, Any] = field(default_factory=dict)
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _lead: asyncio.Task[Any] | None = None

    def who(self, peer: str) -> Who:
        return next((who for who, of in self.peers.items() if of == peer), (self.roles[peer], -1))

    def struck(self, way: str, peer: str, message: Any) -> None:
        if peer in self.roles:
            self.strike(self, way, self.who(peer), message)

    def kill(self, who: Who, *, links_first: bool = False) -> None:
        """As kill -9 does: the control line and the links end, in this order or the other one."""
        self.killed.add(who)
        peer = self.peers[who]
        self.silent.add(peer)
        if links_first:
            for line in list(self.planes[who]._lines.values()):
                line.channel.cut()  # type: ignore[attr-defined]
            asyncio.get_running_loop().call_later(0.05, self._vanish, peer)
        else:
            self._vanish(peer)

    def _vanish(self, peer: str) -> None:
        self._spokes[peer].vanish("it was killed")
        self._tasks[peer].cancel()

    def cut(self, owner: int, worker: int) -> None:
        """The links between these two end; their control lines live."""
        for (_, who), line in list(self.planes["owner", owner]._lines.items()):
            if who == ("worker", worker):
                line.channel.cut()  # type: ignore[attr-defined]

    def stop_lead(self) -> None:
        """As kill -9 of the coordinator."""
        assert self._lead is not None
        self.silent.update(self.roles)
        self._lead.cancel()

    def interrupt(self) -> None:
        """As Ctrl-C at the coordinator."""
        assert self._lead is not None
        self._lead.cancel()

    def repeated(self) -> int:
        """Attempts at windows that were done again."""
        return sum(row["repeated"] for kind, row in self.rows if kind == "round")

    async def play(self, made: RunConfig, resume: bool, dtype: str, patch: Any) -> None:
        hub, runner = ScenicHub(), Runner()
        hub.scene = self
        inner = party_module.Tuning

        def tuning(**options: Any) -> Any:
            self.planes[options["party"].role, options["party"].number] = options["plane"]
            return inner(**options)

        patch.setattr(party_module, "Tuning", tuning)
        settings = LeadSettings(
            made,
            lambda name, _: Path(name),
            folder=self.folder,
            resume=resume,
            advertise="127.0.0.1",
            deadline_s=DEADLINE_S,
            say=self.said.append,
            record=lambda kind, row: self.rows.append((kind, row)),
        )
        for role, count in (("owner", made.server.owners), ("worker", made.server.workers)):
            for number in range(count):
                spoke = hub.join(f"{role}{number}", "127.0.0.1")
                self.roles[spoke.peer], self._spokes[spoke.peer] = role, spoke
                of = PartySettings(
                    role,  # type: ignore[arg-type]
                    made,
                    lambda name, _: Path(name),
                    LinkSettings(host="127.0.0.1"),
                    own_data=self.data.get((role, number)),
                    folder=self.folders.get((role, number), self.folder),
                    dtype=dtype,
                    pace_ms=self.pace_ms if role == "worker" else 0.0,
                )
                self._tasks[spoke.peer] = asyncio.create_task(self._party(of, spoke, None if self.threads else runner))
        try:
            self._lead = asyncio.create_task(lead(settings, hub))
            await asyncio.wait({self._lead})
            if not self._lead.cancelled() and isinstance(error := self._lead.exception(), SplitlmError):
                self.error = error
            elif not self._lead.cancelled():
                self._lead.result()
            await hub.close()
            async with asyncio.timeout(20):
                await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, left
        finally:
            for task in self._tasks.values():
                task.cancel()
            runner.close()
            patch.setattr(party_module, "Tuning", inner)

    async def _party(self, settings: PartySettings, spoke: Any, runner: Runner | None) -> None:
        error: SplitlmError | None = None
        try:
            await run_party(settings, spoke, runner)
        except SplitlmError as caught:
            error = caught
        self.ends[self.who(spoke.peer)] = error
        self.errors += [error] if error is not None else []


def play(
    made: RunConfig,
    folder: Path,
    patch: Any,
    strike: Strike = lambda *_: None,
    *,
    resume: bool = False,
    dtype: str = "float64",
    pace_ms: float = 0.0,
    folders: dict[Who, Path] | None = None,
    data: dict[Who, Path] | None = None,
    threads: bool = False,
) -> Scene:
    """Run it to its end, whatever that is; nothing hangs, and no task is left."""
    scene = Scene(strike, folder, pace_ms, folders or {}, data or {}, threads)

    async def main() -> None:
        async with asyncio.timeout(60):
            await scene.play(made, resume, dtype, patch)

    asyncio.run(main())
    for who, error in scene.ends.items():
        assert error is None or isinstance(error, NetworkError) or who in scene.killed or scene.error, (who, error)
    return scene


def weights(folder: Path, made: RunConfig, party: str) -> dict[str, torch.Tensor]:
    """What a party had at the end of the last complete round."""
    from splitlm.finetune.recipe import model_folder, open_recipe

    recipe = open_recipe(made, model_folder(made, lambda name, _: Path(name)), 0)
    store = RunFolder(folder, identity(recipe))
    last = store.latest()
    assert last is not None
    return dict(store.load(last, party).tensors)


def once(when: Callable[[str, Who, Any], bool], then: Callable[[Scene], None]) -> Strike:
    """Strike at the first message of which ``when`` is true."""
    struck = [False]

    def strike(scene: Scene, way: str, who: Who, message: Any) -> None:
        if not struck[0] and when(way, who, message):
            struck[0] = True
            then(scene)

    return strike
