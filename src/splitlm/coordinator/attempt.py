"""One barrier of one window of training: the table of core/barrier.py, walked with every party."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from splitlm.coordinator.members import Lost, Member, Who
from splitlm.core import messages, training
from splitlm.core.barrier import Event, Leader, step
from splitlm.core.errors import ProtocolError
from splitlm.core.errors import from_exit_code as reported

if TYPE_CHECKING:
    from splitlm.coordinator.training import Training

REASON = 1500
"""Characters of a reason that travel."""
PATIENCE = 1.5
"""How much longer than a party the coordinator waits: an owner knows which worker keeps it waiting."""


class Attempt:
    """One barrier of one window.

    Args:
        training_: the run.
        train: False for a window of validation.
    """

    def __init__(self, training_: Training, *, train: bool = True) -> None:
        self._of, self._train = training_, train
        self.seq = training_.next_seq()
        nodes = frozenset(member.node for member in training_.members)
        self._leader = Leader(nodes, seq=self.seq - 1)
        self._plans: dict[Who, training.Plan] = {}
        self._opened = False
        self._outcome = ""
        self.reason = ""
        self._left = 0

    async def run(self) -> str:
        """``stepped``; ``over`` (nothing was left); ``again``; or ``without``: again, with fewer parties."""
        run, standing = self._of, self._of.standing
        await self._on(Event("begin", self.seq, 0))
        while not self._outcome:
            waiting = ", ".join(str(m) for m in run.members if m.node in self._leader.waiting)
            try:
                awaited = f"{waiting} in window {standing.window} of round {standing.round}"
                member, said = await run.hear(run.orders.timeout_s * PATIENCE, awaited, relay=True)
                await self._take(member, said)
            except Lost as lost:
                await self._lost(lost)
        return self._outcome

    async def _lost(self, lost: Lost) -> None:
        self._left += 1
        node, committing = lost.member.node, self._leader.where == "committing"
        await self._of.without(lost)
        if committing:  # it may have stepped, or not; nobody asks it any more
            if node in self._leader.waiting:
                await self._on(Event("DONE", self.seq, 0, node))
            return
        # Who had said READY cannot take it back: to the others the barrier is as one that took too long.
        on: Literal["NACK", "timeout"] = "NACK" if node in self._leader.waiting else "timeout"
        await self._on(Event(on, self.seq, 0, node), f"{lost.member} was lost")

    async def _take(self, member: Member, said: Any) -> None:
        run = self._of
        match said:
            case training.Plan(seq=self.seq) if member.who[0] == "owner":
                self._check_plan(member, said)
                self._plans[member.who] = said
                await self._open()
            case messages.Prepared(seq=seq):
                await self._on(Event("READY", seq, 0, member.node))
            case messages.Nack(seq=seq, reason=reason):
                await self._on(Event("NACK", seq, 0, member.node, reason))
            case messages.Done(seq=seq):
                await self._on(Event("DONE", seq, 0, member.node))
            case training.Stepped(seq=self.seq):
                run.stepped(member, said)
            case training.Failed(text=text, suspect=suspect, seq=self.seq) if suspect is not None:
                if (lost := run.members.blamed(member, suspect, text)) is not None:
                    await self._lost(lost)
                elif member.node in self._leader.waiting:  # it is gone already
                    await self._on(Event("NACK", self.seq, 0, member.node, text))
            case training.Failed(seq=seq) | training.Plan(seq=seq) | training.Stepped(seq=seq) if seq < self.seq:
                return  # of an attempt that is over
            case training.Failed(code=code, text=text):
                raise reported(code, f"{member}: {text}")
            case other:
                raise ProtocolError(f"{member} sent {type(other).__name__} in a window", expected="Plan, READY or DONE")

    def _check_plan(self, member: Member, plan: training.Plan) -> None:
        workers = {m.who[1] for m in self._of.members.of("worker")}
        if not set(plan.assign) <= workers or plan.items < 0:
            raise ProtocolError(f"{member} planned work for workers {plan.assign}", expected=f"some of {workers}")

    async def _open(self) -> None:
        owners = self._of.members.of("owner")
        if self._opened or any(owner.who not in self._plans for owner in owners):
            return
        self._opened = True
        shares = [training.Share(m.who[1], self._plans[m.who].assign, self._plans[m.who].items) for m in owners]
        if not any(share.assign for share in shares):
            self._outcome = "over"
            await self._of.tell_all(messages.Abort(self.seq, ""))
            return
        await self._of.tell_all(training.Opened(self.seq, shares))

    async def _on(self, event: Event, reason: str = "") -> None:
        """Step the table, and do what it asks for.

        Args:
            event: what happened.
            reason: of an ABORT, where it is not the table's own.
        """
        self._leader, actions = step(self._leader, event)
        run, standing = self._of, self._of.standing
        for action in actions:
            match action.does:
                case "say PREPARE":
                    workers = [m.who[1] for m in run.members.of("worker")]
                    speeds: dict[int, float] = {}
                    if self._train:
                        speeds, run.speeds = run.speeds, {}
                    await run.tell_all(
                        training.Window(self.seq, standing.round, standing.window, workers, speeds, self._train)
                    )
                case "say COMMIT":
                    await run.tell_all(messages.Commit(self.seq, 0))
                case "say ABORT":
                    self.reason = reason or action.reason
                    await run.tell_all(messages.Abort(self.seq, self.reason[:REASON]))
                    await self._on(Event("told", self.seq))
                case "report aborted":
                    self._outcome = "without" if self._left else "again"
                    what = "window" if self._train else "validation window"
                    run.say(f"{what} {standing.window} of round {standing.round} is done again: {self.reason}")
                case "report committed":
                    self._outcome = "stepped"
                case "stop: violation":
                    raise ProtocolError(action.reason)
                case _:
                    pass  # timers: _hear has its own
