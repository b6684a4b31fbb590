"""Who is which owner or worker: in the order of arrival, or, in a run that is gone on with, by the files one has.

An owner's number stands for its share of the rows, for its optimizer, and for the seeds of its dropout. One that comes
back from another address, or in another order, gets its own again.
"""

from __future__ import annotations

from collections.abc import Mapping

from splitlm.coordinator.members import Member, Members
from splitlm.coordinator.orders import Orders
from splitlm.core import training
from splitlm.core.shape import Role
from splitlm.planner.routing import fair


class Places:
    """The numbers of those that register.

    Args:
        orders: of the run.
        members: who has registered.
    """

    def __init__(self, orders: Orders, members: Members) -> None:
        self._orders, self._members = orders, members

    def limit(self, role: Role) -> int:
        """How many the run has of a role."""
        return self._orders.owners if role == "owner" else self._orders.workers

    def take(self, said: training.Register) -> int | None:
        """A number for one more; None: there is none. Another may be given another one for it, that does as well."""
        if not fair(said.weight):
            return None
        role = said.role
        taken = {member.who[1]: member for member in self._members.of(role)}
        moves = self._way(role, said.kept, taken, set())
        if moves is None:
            return None
        for member, number in moves[1:]:
            if member is not None:
                member.who = (role, number)
        return moves[0][1]

    def refusal(self, said: training.Register) -> str:
        """Why there is no number for this one."""
        role, orders = said.role, self._orders
        if not fair(said.weight):
            return f"Its --compute-weight is {said.weight}, and a positive number was expected"
        if len(self._members.of(role)) >= self.limit(role):
            return f"There is no place for another {role}: the run has {self.limit(role)}"
        taken = {member.who[1] for member in self._members.of(role)}
        free = [orders.stored_for((role, n))[0] for n in range(self.limit(role)) if n not in taken]
        here = ", ".join(sorted(name for name, rounds in said.kept.items() if orders.resume in rounds))
        return (
            f"The run goes on after round {orders.resume + 1}, and its places that are left need the files of "
            f"{', '.join(dict.fromkeys(free))} in that round; in this {role}'s folder are those of {here or 'nobody'}. "
            "Start it with the --folder in which it stored them"
        )

    def _fits(self, role: Role, number: int, kept: Mapping[str, list[int]]) -> bool:
        """Whether one who has these files can be this one."""
        if self._orders.resume < 0:
            return True
        return self._orders.resume in kept.get(self._orders.stored_for((role, number))[0], ())

    def _way(
        self, role: Role, kept: Mapping[str, list[int]], taken: Mapping[int, Member], seen: set[int]
    ) -> list[tuple[Member | None, int]] | None:
        """A matching with one more (Kuhn 1955): who gets which number, the new one (None) first; None if there is none.

        Args:
            taken: the numbers that are given.
            seen: those that were tried.
        """
        fits = [n for n in range(self.limit(role)) if n not in seen and self._fits(role, n, kept)]
        for number in fits:
            if number not in taken:
                return [(None, number)]
        for number in fits:
            if number in seen:
                continue
            seen.add(number)
            holder = taken[number]
            rest = self._way(role, holder.kept, taken, seen)
            if rest is not None:
                return [(None, number), (holder, rest[0][1]), *rest[1:]]
        return None
