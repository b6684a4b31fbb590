"""A world for the barrier: a network that loses, repeats, delays and reorders, processes that die at any moment.

``World.play`` walks a schedule of choices and raises ``Violation`` as soon as one of the promises is broken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from splitlm.core.barrier import TABLE, Action, Event, Follower, Leader, Table, step


class Violation(AssertionError):
    """A promise of the barrier that does not hold."""


Choice = tuple[str, int]
"""What happens next: a kind of move, and to whom or to which message."""
HARMLESS = ("deliver", "work", "begin moves", "begin noop", "repeat")
REFUSING = (*HARMLESS, "fail")
HOSTILE = (*REFUSING, "drop", "timeout", "crash")


@dataclass
class World:
    """Followers 0 to count − 1 and a leader; everything under way can be picked in any order."""

    count: int
    table: Table = field(default_factory=lambda: TABLE)
    barriers: int = 3

    def __post_init__(self) -> None:
        self.leader = Leader(frozenset(range(self.count)))
        self.followers = {i: Follower() for i in range(self.count)}
        self.under_way: list[tuple[int, Event]] = []  # (to whom; −1 is the leader, event)
        self.repeats = 12
        self.work: dict[int, int] = {}  # follower -> barrier whose cut it is preparing
        self.applying: dict[int, int] = {}
        self.timers: dict[int, int] = {}
        self.crashed: set[int] = set()
        self.worked: set[tuple[int, int]] = set()
        self.said_ready: set[tuple[int, int]] = set()
        self.decided: dict[int, tuple[str, int]] = {}
        self.reports: list[tuple[str, int]] = []
        self.begun = 0

    # What may happen next

    def moves(self, kinds: tuple[str, ...]) -> list[Choice]:
        """Every move of these kinds that is possible now."""
        return [move for kind in kinds for move in self._moves(kind)]

    def _moves(self, kind: str) -> Iterator[Choice]:
        match kind:
            case "deliver" | "drop":
                lossy = range(len(self.under_way))
                yield from ((kind, i) for i in lossy if kind == "deliver" or self.under_way[i][1].on != "lost")
            case "repeat" if self.repeats:
                yield from ((kind, i) for i in range(len(self.under_way)) if self.under_way[i][1].on != "lost")
            case "work":
                yield from ((kind, i) for i in {**self.work, **self.applying})
            case "fail":
                yield from ((kind, i) for i in self.work if i >= 0)
            case "begin moves" | "begin noop" if self.leader.where == "idle" and self.begun < self.barriers:
                if -1 not in self.crashed:
                    yield kind, -1
            case "timeout":
                yield from ((kind, i) for i in self.timers)
            case "crash":
                yield from ((kind, i) for i in range(-1, self.count) if i not in self.crashed)

    def play(self, schedule: list[int], kinds: tuple[str, ...] = HOSTILE) -> None:
        """Walk a schedule: each number picks one of the possible moves; hostile ones are rare, so that much happens."""
        for number in schedule:
            rare = number % 9 == 0
            options = self.moves(kinds if rare else HARMLESS) or self.moves(kinds)
            number //= 9
            if not options:
                return
            self.move(options[number % len(options)])
            self.check()

    def settle(self, *, timeouts: bool) -> None:
        """Let everything that is under way arrive and every piece of work end, then (if asked) every timer run out."""
        for _ in range(1000):
            options = self.moves(("deliver", "work")) or (self.moves(("timeout",)) if timeouts else [])
            if not options:
                break
            self.move(options[0])
            self.check()
        else:
            raise Violation("it never comes to rest")
        self.check_rest()

    # Moves

    def move(self, choice: Choice) -> None:
        kind, i = choice
        match kind:
            case "deliver":
                to, event = self.under_way.pop(i)
                self.event(to, event)
            case "drop":
                self.under_way.pop(i)
            case "repeat":
                self.repeats -= 1
                self.under_way.append(self.under_way[i])
            case "work" if i in self.applying:
                self.event(i, Event("applied", self.applying.pop(i)))
            case "work" if i == -1:
                self.event(i, Event("told", self.work.pop(i)))
            case "work":
                seq = self.work.pop(i)
                self.worked.add((i, seq))
                self.event(i, Event("ready", seq))
            case "fail":
                self.event(i, Event("failed", self.work.pop(i), reason="disk full"))
            case "begin moves" | "begin noop":
                self.begun += 1
                epoch = self.leader.epoch + (kind == "begin moves")
                self.event(-1, Event("begin", self.leader.seq + 1, epoch))
            case "timeout":
                self.event(i, Event("timeout", self.timers.pop(i)))
            case "crash":
                self.crashed.add(i)
                for owed in (self.work, self.applying, self.timers):
                    owed.pop(i, None)
                hearers = range(self.count) if i == -1 else [-1]
                self.under_way += [(to, Event("lost", node=max(i, 0), reason="reset")) for to in hearers]

    def event(self, to: int, event: Event) -> None:
        if to in self.crashed:
            return
        if to == -1:
            self.leader, actions = step(self.leader, event, self.table)
            for action in actions:
                self.lead(action)
            if "say ABORT" in [a.does for a in actions]:
                self.work[-1] = self.leader.seq
        else:
            before = self.followers[to]
            after, actions = step(before, event, self.table)
            if not before.epoch <= after.epoch <= before.epoch + 1:
                raise Violation(f"follower {to} went from epoch {before.epoch} to {after.epoch}")
            self.followers[to] = after
            for action in actions:
                self.follow(to, action)

    def lead(self, action: Action) -> None:
        seq, epoch = action.seq, action.epoch
        match action.does.split()[0], action.does.split()[-1]:
            case "say", word:
                if word in ("COMMIT", "ABORT"):
                    if seq in self.decided:
                        raise Violation(f"barrier {seq} was decided twice: {self.decided[seq]}, then {word}")
                    self.decided[seq] = (word, epoch)
                if word == "COMMIT":
                    self._check_decision(seq)
                self.under_way += [(i, Event(word, seq, epoch)) for i in range(self.count)]  # type: ignore[arg-type]
            case "report", word:
                self.reports.append((word, seq))
            case "start", _:
                self.timers[-1] = seq
            case _:
                self.timers.pop(-1, None)

    def _check_decision(self, seq: int) -> None:
        for i, state in self.followers.items():
            if (i, seq) not in self.said_ready:
                raise Violation(f"barrier {seq} was committed though follower {i} had not said READY")
            if i not in self.crashed and state.where != "stopped" and (state.where, state.seq) != ("prepared", seq):
                raise Violation(f"follower {i} did not wait for the decision of barrier {seq}: {state}")

    def follow(self, i: int, action: Action) -> None:
        seq = action.seq
        match action.does:
            case "prepare":
                self.work[i] = seq
            case "discard":
                self.work.pop(i, None)
                if self.decided.get(seq, ("", 0))[0] == "COMMIT":
                    raise Violation(f"follower {i} dropped what barrier {seq} committed")
            case "apply":
                if self.decided.get(seq) != ("COMMIT", action.epoch):
                    raise Violation(f"follower {i} applies barrier {seq}, which was {self.decided.get(seq)}")
                self.applying[i] = seq
            case "start timer":
                self.timers[i] = seq
            case "say READY" | "say NACK" | "say DONE":
                if action.does == "say READY":
                    if (i, seq) not in self.worked:
                        raise Violation(f"follower {i} said READY for barrier {seq} before it was")
                    self.said_ready.add((i, seq))
                word = action.does.split()[1]
                self.under_way.append((-1, Event(word, seq, node=i, reason=action.reason)))  # type: ignore[arg-type]
            case _:  # stop timer, and every stop
                self.timers.pop(i, None)

    # Promises

    @property
    def someone_stopped(self) -> bool:
        """Whether a process is dead or has stopped."""
        states = [self.leader.where, *(state.where for state in self.followers.values())]
        return bool(self.crashed) or "stopped" in states

    def check(self) -> None:
        """What holds at every moment."""
        epochs = {0} | {epoch for word, epoch in self.decided.values() if word == "COMMIT"}
        for i, state in self.followers.items():
            if state.epoch not in epochs:
                raise Violation(f"follower {i} serves epoch {state.epoch}, which was never committed")
        if self.leader.where == "idle" and -1 not in self.crashed:
            for i, state in self.followers.items():
                if i not in self.crashed and state.epoch != self.leader.epoch:
                    raise Violation(f"no barrier is under way; leader {self.leader.epoch}, follower {i}: {state.epoch}")

    def check_rest(self) -> None:
        """What holds once nothing is under way: nobody hangs, who lost a peer has stopped, one epoch serves."""
        alive = {i: s.where for i, s in self.followers.items() if i not in self.crashed}
        if -1 in self.crashed:
            if set(alive.values()) - {"stopped"}:
                raise Violation(f"the leader is dead and followers go on: {alive}")
        elif self.crashed and self.leader.where != "stopped":
            raise Violation(f"follower {self.crashed} is dead and the leader goes on: {self.leader}")
        if set(alive.values()) - {"idle", "stopped"}:
            raise Violation(f"at rest, a follower hangs: {alive}")
        if -1 not in self.crashed and self.leader.where not in ("idle", "stopped"):
            raise Violation(f"at rest, the leader hangs: {self.leader}")
        serving = {s.epoch for i, s in self.followers.items() if s.where == "idle" and i not in self.crashed}
        if len(serving) > 1 and not self.someone_stopped:
            raise Violation(f"two epochs serve at once: {serving}")
