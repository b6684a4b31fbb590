"""An owner or a worker of a measured training run, in a process of its own."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from splitlm.bus.base import Spoke
from splitlm.core import messages, training
from splitlm.core.config import read
from splitlm.core.errors import NetworkError
from splitlm.core.shape import Role
from splitlm.node.guard import Guard
from splitlm.node.identity import node_name
from splitlm.node.party import PartySettings, run_party
from splitlm.node.partylinks import LinkSettings
from splitlm.node.trainbus import join_star

DEADLINE_S = 120.0


def rss_kib() -> float:
    """Memory of this process that is in RAM, in KiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1024


class Ears:
    """A spoke that notes how much memory the process has at each round's end, and what its part has cost by then.

    Attributes:
        stopped: whether the coordinator ended the run early, as this bench does once it has measured.
    """

    def __init__(self, spoke: Spoke) -> None:
        self._spoke = spoke
        self.rss: list[float] = []
        self.figures: dict[str, float] = {}
        self.stopped = False

    @property
    def hub_host(self) -> str:
        """See ``Spoke``."""
        return self._spoke.hub_host

    async def send(self, message: messages.Message) -> None:
        """See ``Spoke``."""
        match message:
            case training.Figures(values=values):
                self.rss.append(rss_kib())
                self.figures = values
        await self._spoke.send(message)

    async def receive(self) -> messages.Any:
        """See ``Spoke``."""
        said = await self._spoke.receive()
        self.stopped = self.stopped or isinstance(said, messages.Trouble)
        return said

    async def close(self) -> None:
        """See ``Spoke``."""
        await self._spoke.close()


class PartyWork:
    """One party; its one turn is the whole run.

    Args:
        role: owner or worker.
        config: of the run, as a mapping.
        pace_ms: least time of a forward or a backward, see ``model.compute.paced_part``.
    """

    def __init__(self, *, role: Role, config: dict[str, Any], pace_ms: float = 0.0) -> None:
        self._role, self._pace_ms = role, pace_ms
        self._config = read(config, "the bench's settings")
        self.told: dict[str, Any] = {}

    def run(self, *, port: int, token: str) -> dict[str, Any]:
        """Take part until the coordinator ends the run; then what it was like here."""
        return asyncio.run(self._run(port, token))

    async def _run(self, port: int, token: str) -> dict[str, Any]:
        name = node_name(self._role)
        ears = Ears(await join_star(name, ("127.0.0.1", port), "127.0.0.1", token, Guard(), DEADLINE_S))
        party = PartySettings(
            self._role,
            self._config,
            lambda name, _: Path(name),
            links=LinkSettings(token=token, deadline_s=DEADLINE_S),
            threads=1,
            pace_ms=self._pace_ms,
        )
        try:
            await run_party(party, ears)
        except NetworkError:
            if not ears.stopped:
                raise
        finally:
            await ears.close()
        return {"rss": ears.rss, "figures": ears.figures}

    def close(self) -> None:
        """Nothing to do."""
