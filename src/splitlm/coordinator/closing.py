"""A round's end: every owner is through its rows, everyone takes the average, and the round is made whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from splitlm.coordinator.attempt import PATIENCE
from splitlm.coordinator.members import Lost, Who
from splitlm.coordinator.orders import Aggregator
from splitlm.core import messages, training
from splitlm.core.errors import ProtocolError

if TYPE_CHECKING:
    from splitlm.coordinator.training import Training


class Closing:
    """The end of one round.

    Args:
        training_: the run.
        aggregator: who averages.
    """

    def __init__(self, training_: Training, aggregator: Aggregator) -> None:
        self._of, self._aggregator = training_, aggregator

    async def notified(self) -> None:
        """Every owner says that it is through its rows."""
        run, standing = self._of, self._of.standing
        while waiting := [m for m in run.members.of("owner") if m.who not in standing.notified]:
            names = ", ".join(map(str, waiting))
            try:
                patience = run.orders.timeout_s * PATIENCE
                member, said = await run.hear(patience, f"{names} to finish round {standing.round}", relay=True)
            except Lost as lost:
                await run.without(lost)
                continue
            match said:
                case training.Notify():
                    standing.notified[member.who] = said
                case training.Stepped():
                    run.stepped(member, said)
                case other if not of_a_window(other):
                    raise ProtocolError(f"{member} sent {type(other).__name__}", expected="Notify")

    async def averaged(self) -> dict[str, Any]:
        """Everyone that is left has the average, and what is kept of the round is written; the round's record."""
        run, standing = self._of, self._of.standing
        await self._aggregator.begin(standing.round, [member.who for member in run.members])
        await run.tell_all(training.Gather(standing.round))
        saved: dict[Who, training.Saved] = {}
        while waiting := [m for m in run.members if m.who not in saved]:
            names = ", ".join(map(str, waiting))
            try:
                member, said = await run.hear(run.orders.timeout_s, f"{names} to take the average")
            except Lost as lost:
                await run.without(lost)
                continue
            match said:
                case training.Saved():
                    saved[member.who] = said
                case other if not of_a_window(other):
                    raise ProtocolError(f"{member} sent {type(other).__name__}", expected="Saved")
        saved = {who: said for who, said in saved.items() if run.members.by_who(who) is not None}
        counted = await self._aggregator.complete(standing.round, saved)
        standing.notified = {who: told for who, told in standing.notified.items() if who in counted}
        return standing.row(any(member.loaded.token_loss for member in run.members))


def of_a_window(said: messages.Message) -> bool:
    """Whether this is of a window's barrier: once no window is open, it is late, and of an attempt that is over."""
    match said:
        case messages.Prepared() | messages.Nack() | messages.Done() | training.Plan():
            return True
        case training.Failed(where=where):
            return where == "window"
        case _:
            return False
