"""Who takes part in a training run, as the coordinator knows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from splitlm.core import training
from splitlm.core.errors import UsageError
from splitlm.core.heard import Heard
from splitlm.core.shape import Role

Who = tuple[Role, int]
"""A party: its role, and its number among those of the role."""


@dataclass
class Member:
    """One party.

    Attributes:
        peer: its id on the bus.
        who: what it is.
        node: its number in barriers.
        name: how it calls itself.
        weight: of a worker, against the others.
        kept: of whom, and of which rounds, files lie in its folder.
        loaded: what it said once it was built.
        heard: what it has said.
    """

    peer: str
    who: Who
    node: int
    name: str
    weight: float = 1.0
    kept: Mapping[str, list[int]] = field(default_factory=dict)
    loaded: training.Loaded = field(default_factory=training.Loaded)
    heard: Heard = field(default_factory=Heard)

    @property
    def label(self) -> str:
        """Role and number, as metrics name it."""
        return f"{self.who[0]} {self.who[1]}"

    def __str__(self) -> str:
        return f"{self.who[0]} {self.who[1]} ({self.name})"


class Members:
    """The parties that are left, in the order of their roles and numbers."""

    def __init__(self) -> None:
        self._of: dict[str, Member] = {}
        self._nodes = 0

    def __iter__(self) -> Iterator[Member]:
        return iter(sorted(self._of.values(), key=lambda member: member.who))

    def __len__(self) -> int:
        return len(self._of)

    def add(self, peer: str, number: int, said: training.Register) -> Member:
        """One more."""
        self._nodes += 1
        member = self._of[peer] = Member(peer, (said.role, number), self._nodes, said.name, said.weight, said.kept)
        return member

    def of(self, role: Role) -> list[Member]:
        """All of a role."""
        return [member for member in self if member.who[0] == role]

    def by_peer(self, peer: str) -> Member | None:
        """The party behind an id of the bus, if it is one."""
        return self._of.get(peer)

    def by_who(self, who: Who) -> Member | None:
        """The party of a role and number, if it is left."""
        return next((member for member in self if member.who == who), None)

    def drop(self, member: Member) -> None:
        """It is gone."""
        self._of.pop(member.peer, None)

    def at(self, node: str) -> Member:
        """The worker of a node: the first on a host of that name, or the one of that number (``worker-1``).

        Raises:
            UsageError: there is none.
        """
        workers = self.of("worker")
        hosts = [member.name.partition(" ")[2].rpartition(":")[0] for member in workers]
        by_host = (member for member, host in zip(workers, hosts, strict=True) if host == node)
        by_number = (member for member in workers if f"worker-{member.who[1]}" == node)
        if (found := next(by_host, None) or next(by_number, None)) is None:
            raise UsageError(
                f"No worker of this run is {node[:60]!r}",
                where="server.aggregator",
                expected=f"worker-0{f' to worker-{len(workers) - 1}' * (len(workers) > 1)}, or "
                f"{' or '.join(sorted(set(hosts)))}, where the workers are",
            )
        return found

    def blamed(self, accuser: Member, suspect: Who, text: str) -> Lost | None:
        """Who is to go when one party cannot reach another; None where that one is gone already.

        It is the one that is accused, unless the others of the accuser's role, who reach it, would then have none.
        """
        accused = self.by_who(suspect)
        if accused is None:
            return None
        if len(self.of(accused.who[0])) == 1 and len(self.of(accuser.who[0])) > 1:
            return Lost(accuser, f"it cannot reach {accused}: {text}")
        return Lost(accused, f"{accuser} cannot reach it: {text}")


class Lost(Exception):
    """A party was lost; what was being waited for may never come."""

    def __init__(self, member: Member, reason: str) -> None:
        super().__init__(reason)
        self.member, self.reason = member, reason
