"""The coordinator: what it decides, what it says, when it stops, and what it measures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace

from splitlm.coordinator.apply import apply
from splitlm.coordinator.coordinator import Coordinator
from splitlm.coordinator.decide import decide
from splitlm.coordinator.state import Begin, Decision, Heard, Lost, State, TimedOut, Told
from splitlm.core import messages as m
from splitlm.core.barrier import Leader
from splitlm.core.cut import Cut, make_cut, shift
from splitlm.core.errors import CutError, NetworkError, PeerLostError, ProtocolError, UsageError
from splitlm.node.follower import Follower

OLD = make_cut(9, (3, 6))
NEW = shift(OLD, 1, 1)
MOVE = Decision("forced-shift", NEW, predicted_ms=1.5)
NODES = (0, 1, 2)
ORDER = (1, 2, 0)
"""The head's own stage is told last: it works in the head's process."""


# apply and decide, without a loop


def fresh() -> State:
    return State(Leader(frozenset(NODES)), OLD)


def settle(state: State) -> State:
    return replace(state, owed=())


def ready(state: State, *nodes: int, seq: int = 1) -> State:
    for node in nodes:
        state = apply(state, Heard(node, m.Prepared(seq)))
    return state


def test_every_follower_is_asked_and_told_and_may_forget() -> None:
    state = apply(fresh(), Begin(MOVE))
    assert decide(state) == [(node, m.Prepare(1, 1, "forced-shift", NEW)) for node in ORDER]
    state = ready(settle(state), 0, 1)
    assert decide(state) == [] and state.acks == 2
    state = ready(state, 1)
    assert state.acks == 2, "a repeated READY counts once"
    state = ready(state, 2)
    assert decide(state) == [(node, m.Commit(1, 1)) for node in ORDER]
    state = settle(state)
    for node in NODES:
        assert state.ended == "" and state.cut == OLD
        state = apply(state, Heard(node, m.Done(1)))
    assert (state.ended, state.cut, state.acks) == ("committed", NEW, 3)
    assert decide(state) == [(node, m.Finish(1)) for node in ORDER]


def test_a_noop_keeps_the_cut_and_needs_no_finish() -> None:
    state = settle(ready(apply(fresh(), Begin(Decision())), *NODES))
    for node in NODES:
        state = apply(state, Heard(node, m.Done(1)))
    assert (state.ended, state.cut, state.leader.seq, state.leader.epoch) == ("committed", OLD, 1, 0)
    assert decide(state) == []


def test_a_refusal_is_told_to_all_with_who_and_what() -> None:
    state = settle(ready(apply(fresh(), Begin(MOVE)), 0))
    state = apply(state, Heard(1, m.Nack(1, "no room for block 3")))
    reason = "Node 1 refused: no room for block 3 in state 'gathering' of barrier 1"
    assert decide(state) == [(node, m.Abort(1, reason)) for node in ORDER]
    state = apply(settle(state), Told(1))
    assert (state.ended, state.cut, state.reason) == ("aborted", OLD, reason)


def test_a_stop_is_told_to_the_stages_but_not_to_the_heads_own() -> None:
    state = settle(ready(apply(fresh(), Begin(MOVE)), *NODES))
    state = apply(state, Lost(2, "reset"))
    assert (state.ended, state.cut) == ("lost", OLD)
    text = "Node 2 was lost: reset in state 'committing' of barrier 1; state unknown"
    assert decide(state) == [(1, m.Trouble(3, text)), (2, m.Trouble(3, text))]


def test_a_reason_of_any_length_fits_a_message() -> None:
    state = settle(apply(fresh(), Begin(MOVE)))
    state = apply(state, Heard(1, m.Nack(1, "€" * 2000)))
    assert all(len(m.encode(message)) <= m.MAX_MESSAGE_BYTES for _, message in decide(state))


@pytest.mark.parametrize(
    ("decision", "kind", "says"),
    [
        (Decision("noop", NEW), UsageError, "A noop decision"),
        (Decision("auto"), UsageError, "A auto decision"),
        (Decision("auto", replace(NEW, epoch=2)), CutError, "epoch 2 cannot follow one of epoch 0"),
        (Decision("auto", replace(OLD, epoch=1)), CutError, "moves no block"),
        (Decision("auto", replace(make_cut(9, (7, 8)), epoch=1)), CutError, "would move from node 2 to node 0"),
    ],
)
def test_a_decision_that_cannot_be_is_refused_before_anyone_is_asked(
    decision: Decision, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        apply(fresh(), Begin(decision))


def test_strangers_and_other_messages_are_refused() -> None:
    with pytest.raises(ProtocolError, match="Node 7 takes no part"):
        apply(fresh(), Heard(7, m.Done(1)))
    for message in (m.Ready(), m.Commit(1, 1), m.Ping(), m.Join("x")):
        with pytest.raises(ProtocolError, match=f"Node 1 sent a {type(message).__name__} message"):
            apply(fresh(), Heard(1, message))


def test_an_answer_to_what_was_not_asked_stops() -> None:
    state = apply(fresh(), Heard(1, m.Prepared(1)))
    assert state.ended == "violated"
    state = apply(settle(apply(fresh(), Begin(MOVE))), Heard(1, m.Done(1)))
    assert state.ended == "violated" and "out of turn" in state.reason


def test_a_late_timer_changes_nothing() -> None:
    state = settle(ready(apply(fresh(), Begin(MOVE)), *NODES))
    assert apply(state, TimedOut(0)) == state


# The loop, with followers that are real drivers around fake work


class FakeWork:
    def __init__(self, ring: Ring, node: int) -> None:
        self.ring, self.node = ring, node

    async def _call(self, name: str) -> None:
        self.ring.calls.append((self.node, name))
        hook = self.ring.hooks.get((self.node, name))
        if hook is not None:
            await hook()

    async def announced(self, cut: Cut) -> None:
        await self._call("announced")

    async def prepare(self, prepare: m.Prepare) -> None:
        await self._call("prepare")

    async def commit(self, cut: Cut | None) -> None:
        await self._call("commit")

    async def abort(self) -> None:
        await self._call("abort")

    async def finish(self) -> None:
        await self._call("finish")


class Ring:
    """A coordinator and three followers in one process; messages go through JSON."""

    def __init__(self, timeout: float = 60.0, follower_timeout: float = 60.0) -> None:
        self.calls: list[tuple[int, str]] = []
        self.hooks: dict[tuple[int, str], Callable[[], Awaitable[None]]] = {}
        self.mute: set[int] = set()
        self.broken: set[int] = set()
        self.sent: list[tuple[int, m.Message]] = []
        self.coordinator = Coordinator(self.send, NODES, cut=OLD, ctrl_timeout_s=timeout)
        self.followers = {
            node: Follower(self.sayer(node), FakeWork(self, node), node=node, ctrl_timeout_s=follower_timeout)
            for node in NODES
        }
        self.tasks = [asyncio.create_task(follower.run()) for follower in self.followers.values()]

    async def send(self, node: int, message: m.Message) -> None:
        self.sent.append((node, message))
        if node in self.broken:
            raise PeerLostError(f"Peer {node} is gone")
        if node not in self.mute:
            self.followers[node].hear(m.decode(m.encode(message)))

    def sayer(self, node: int) -> Callable[[m.Message], Awaitable[None]]:
        async def say(message: m.Message) -> None:
            if node not in self.mute:
                self.coordinator.hear(node, m.decode(m.encode(message)))

        return say

    def called(self, name: str) -> list[int]:
        return sorted(node for node, what in self.calls if what == name)


def play(story: Callable[[Ring], Awaitable[None]], timeout: float = 60.0, follower_timeout: float = 60.0) -> None:
    async def main() -> None:
        ring = Ring(timeout, follower_timeout)
        try:
            await story(ring)
        finally:
            for task in ring.tasks:
                task.cancel()
            await asyncio.wait(ring.tasks)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_barriers_in_a_row_raise_the_epoch_only_when_blocks_move() -> None:
    async def story(ring: Ring) -> None:
        first = await ring.coordinator.barrier()
        second = await ring.coordinator.barrier(MOVE)
        third = await ring.coordinator.barrier(Decision("auto", shift(NEW, 2, -1)))
        assert [(o.seq, o.epoch, o.committed, o.aborted, o.n_acks) for o in (first, second, third)] == [
            (1, 0, True, False, 3),
            (2, 1, True, False, 3),
            (3, 2, True, False, 3),
        ]
        assert second.cut == NEW and ring.coordinator.cut == third.cut == shift(NEW, 2, -1)
        await asyncio.sleep(0.01)
        assert {f.state.epoch for f in ring.followers.values()} == {2}
        assert ring.called("finish") == [0, 0, 1, 1, 2, 2]

    play(story)


def test_the_figures_are_those_of_the_clock() -> None:
    async def story(ring: Ring) -> None:
        now = [10.0]
        ring.coordinator._clock = lambda: now[0]

        async def prepare() -> None:
            now[0] += 0.25

        async def commit() -> None:
            now[0] += 0.5

        ring.hooks = {(1, "prepare"): prepare, (2, "commit"): commit}
        outcome = await ring.coordinator.barrier(MOVE)
        assert outcome.prestage_ms == pytest.approx(250)
        assert outcome.commit_ms == pytest.approx(500)
        assert outcome.barrier_ms == pytest.approx(750)
        window = outcome.record(drain_ms=50)
        assert window.barrier_ms == pytest.approx(800) and window.drain_ms == 50
        assert (window.node, window.seq, window.epoch, window.n_acks, window.aborted) == (0, 1, 1, 3, False)
        assert (window.decision, window.predicted_ms, window.reason) == ("forced-shift", 1.5, None)

    play(story)


def test_a_refusal_aborts_everywhere_and_the_next_barrier_works() -> None:
    async def story(ring: Ring) -> None:
        async def refuse() -> None:
            raise OSError("disk full")

        ring.hooks = {(1, "prepare"): refuse}
        outcome = await ring.coordinator.barrier(MOVE)
        assert (outcome.committed, outcome.aborted, outcome.epoch, outcome.cut) == (False, True, 0, OLD)
        assert outcome.reason == "Node 1 refused: disk full in state 'gathering' of barrier 1"
        assert (outcome.prestage_ms, outcome.commit_ms) == (None, None)
        assert outcome.record().reason == outcome.reason
        ring.hooks.clear()
        again = await ring.coordinator.barrier(MOVE)
        assert (again.seq, again.committed, again.epoch) == (2, True, 1)
        assert ring.called("abort") == [0, 1, 2]

    play(story)


def test_a_stage_that_is_not_ready_in_time_is_named_and_the_barrier_is_aborted() -> None:
    async def story(ring: Ring) -> None:
        ring.mute = {2}
        outcome = await ring.coordinator.barrier(MOVE)
        assert outcome.aborted and outcome.n_acks == 2
        assert outcome.reason == "Node 2 did not say READY in time in state 'gathering' of barrier 1"
        ring.mute.clear()
        assert (await ring.coordinator.barrier(MOVE)).committed

    play(story, timeout=0.1)


def test_a_stage_that_is_silent_after_commit_stops_the_ring() -> None:
    async def story(ring: Ring) -> None:
        async def vanish() -> None:
            ring.mute.add(2)

        ring.hooks = {(2, "commit"): vanish}
        with pytest.raises(PeerLostError, match=r"Node 2 did not say DONE in time in state 'committing'.*unknown"):
            await ring.coordinator.barrier(MOVE)
        with pytest.raises(PeerLostError, match="Node 2 did not say DONE"):
            await ring.coordinator.barrier()
        assert isinstance(ring.coordinator.failure, NetworkError)
        assert [node for node, message in ring.sent if isinstance(message, m.Trouble)] == [1, 2]

    play(story, timeout=0.1)


@pytest.mark.parametrize(("step", "where"), [("prepare", "gathering"), ("commit", "committing")])
def test_a_stage_that_is_lost_stops_the_ring_and_the_others_are_told(step: str, where: str) -> None:
    async def story(ring: Ring) -> None:
        async def die() -> None:
            ring.mute.add(2)
            ring.coordinator.lost(2, "Connection reset.")

        ring.hooks = {(2, step): die}
        with pytest.raises(PeerLostError, match=f"Node 2 was lost: Connection reset in state '{where}' of barrier 1"):
            await ring.coordinator.barrier(MOVE)
        with pytest.raises(PeerLostError, match="The head was lost: Node 2 was lost"):
            await ring.tasks[1]
        if step == "prepare":
            assert ring.called("commit") == []

    play(story)


def test_a_stage_that_cannot_be_told_is_lost() -> None:
    async def story(ring: Ring) -> None:
        ring.broken = {1}
        with pytest.raises(PeerLostError, match="Node 1 was lost: Peer 1 is gone in state 'gathering'"):
            await ring.coordinator.barrier()
        told = {
            kind: [node for node, message in ring.sent if isinstance(message, kind)] for kind in (m.Prepare, m.Abort)
        }
        assert told == {m.Prepare: [1, 2, 0], m.Abort: [1, 2, 0]}

    play(story)


def test_a_stage_that_takes_no_message_is_lost_and_the_others_are_told() -> None:
    async def story(ring: Ring) -> None:
        send = ring.coordinator._send

        async def clogged(node: int, message: m.Message) -> None:
            await (asyncio.Event().wait() if node == 1 else send(node, message))

        ring.coordinator._send = clogged
        with pytest.raises(PeerLostError, match=r"Node 1 was lost: It took no Prepare message in 0\.05 s"):
            await ring.coordinator.barrier()
        assert [node for node, message in ring.sent if isinstance(message, m.Prepare)] == [2, 0]

    play(story, timeout=0.05)


def test_a_stage_lost_between_barriers_is_told_at_the_next_one() -> None:
    async def story(ring: Ring) -> None:
        ring.coordinator.lost(1, "reset")
        with pytest.raises(PeerLostError, match="Node 1 was lost: reset in state 'idle'"):
            await ring.coordinator.barrier()
        with pytest.raises(PeerLostError, match="'idle'"):
            await ring.coordinator.announce(NEW)

    play(story)


def test_what_is_announced_is_staged_by_all_or_not() -> None:
    async def story(ring: Ring) -> None:
        gate = asyncio.Event()
        assert not await ring.coordinator.staged(0), "nothing was announced"
        ring.hooks = {(1, "announced"): lambda: hold(gate)}
        await ring.coordinator.announce(NEW)
        assert not await ring.coordinator.staged(0.02)
        assert (await ring.coordinator.barrier()).committed, "a noop goes on beside it"
        waiting = asyncio.create_task(ring.coordinator.staged(60))
        gate.set()
        assert await waiting
        assert (await ring.coordinator.barrier(MOVE)).committed
        assert not await ring.coordinator.staged(0), "it was used up"

    play(story)


def test_what_one_stage_cannot_bring_is_not_waited_for() -> None:
    async def story(ring: Ring) -> None:
        async def fail() -> None:
            raise OSError("no such file")

        ring.hooks = {(2, "announced"): fail}
        await ring.coordinator.announce(NEW)
        assert not await ring.coordinator.staged(60)
        with pytest.raises(CutError, match="moves no block"):
            await ring.coordinator.announce(replace(OLD, epoch=1))

    play(story)


async def hold(gate: asyncio.Event) -> None:
    await gate.wait()
