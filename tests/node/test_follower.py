"""A stage's driver in barriers: what it says and does, its deadlines, and what it raises."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from splitlm.core import messages as m
from splitlm.core.cut import Cut, make_cut, shift
from splitlm.core.errors import NetworkError, PeerLostError, ProtocolError, UsageError
from splitlm.node.follower import Follower
from splitlm.telemetry.record import Window

OLD = make_cut(4, (2,))
NEW = shift(OLD, 1, 1)
NOOP = m.Prepare(1, 0, "noop")
MOVE = m.Prepare(1, 1, "forced-shift", NEW)


class Fake:
    """Work that notes what it is asked; ``hold`` keeps a call from ending, ``fail`` makes it raise."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.hold: dict[str, asyncio.Event] = {}
        self.fail: dict[str, Exception] = {}

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.hold:
            try:
                await self.hold[name].wait()
            except asyncio.CancelledError:
                self.calls.append(f"{name} cancelled")
                raise
        if name in self.fail:
            raise self.fail[name]

    async def announced(self, cut: Cut) -> None:
        await self._call("announced")

    async def prepare(self, prepare: m.Prepare) -> None:
        await self._call("prepare")

    async def commit(self, cut: Cut | None) -> None:
        await self._call("commit" if cut is None else f"commit {cut.boundaries}")

    async def abort(self) -> None:
        await self._call("abort")

    async def finish(self) -> None:
        await self._call("finish")


class Scene:
    """A follower that runs, what it said, and its records."""

    def __init__(self, timeout: float = 60.0) -> None:
        self.said: list[m.Message] = []
        self.heard = asyncio.Condition()
        self.work = Fake()
        self.windows: list[Window] = []
        self.broken: NetworkError | None = None
        self.follower = Follower(self.say, self.work, node=2, ctrl_timeout_s=timeout, record=self.windows.append)
        self.running = asyncio.create_task(self.follower.run())

    async def say(self, message: m.Message) -> None:
        if self.broken is not None:
            raise self.broken
        self.said.append(message)

    async def hear(self, *messages: m.Any) -> None:
        for message in messages:
            self.follower.hear(message)
            await settled()


async def settled() -> None:
    """Let everything that can run without waiting run."""
    for _ in range(20):
        await asyncio.sleep(0)


def play(story: Callable[[Scene], Awaitable[None]], timeout: float = 60.0) -> None:
    async def main() -> None:
        scene = Scene(timeout)
        await settled()
        try:
            await story(scene)
        finally:
            scene.running.cancel()
            await asyncio.wait({scene.running})
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_move_is_announced_prepared_committed_and_finished() -> None:
    async def story(scene: Scene) -> None:
        await scene.hear(m.Announce(NEW), MOVE, m.Commit(1, 1), m.Finish(1))
        assert scene.said == [m.Staged(1), m.Prepared(1), m.Done(1)]
        assert scene.work.calls == ["announced", "prepare", "commit (3,)", "finish"]
        assert (scene.follower.state.where, scene.follower.state.epoch) == ("idle", 1)
        (window,) = scene.windows
        assert (window.node, window.seq, window.epoch, window.decision) == (2, 1, 1, "forced-shift")
        assert not window.aborted and window.reason is None
        assert window.prestage_ms is not None and window.commit_ms is not None
        assert 0 <= window.prestage_ms <= window.barrier_ms

    play(story)


def test_a_repeated_commit_is_answered_again_and_an_old_prepare_is_not() -> None:
    async def story(scene: Scene) -> None:
        await scene.hear(NOOP, NOOP, m.Commit(1, 0), m.Commit(1, 0), NOOP)
        assert scene.said == [m.Prepared(1), m.Prepared(1), m.Done(1), m.Done(1)]
        assert scene.work.calls == ["prepare", "commit"]

    play(story)


@pytest.mark.parametrize("error", [UsageError("No room for block 3"), OSError("disk full"), MemoryError()])
def test_work_that_fails_is_refused_with_its_reason_and_the_next_barrier_works(error: Exception) -> None:
    async def story(scene: Scene) -> None:
        scene.work.fail["prepare"] = error
        await scene.hear(MOVE)
        (said,) = scene.said
        assert isinstance(said, m.Nack) and said.seq == 1
        assert said.reason.startswith(str(error).rstrip(".") or "MemoryError")
        assert scene.work.calls == ["prepare", "abort"]
        assert scene.windows[0].aborted and scene.windows[0].reason
        scene.work.fail.clear()
        await scene.hear(m.Abort(1, "Node 2 refused"), m.Prepare(2, 1, "forced-shift", NEW), m.Commit(2, 1))
        assert scene.said[1:] == [m.Prepared(2), m.Done(2)]
        assert scene.follower.state.epoch == 1

    play(story)


def test_a_mistake_in_the_work_is_not_taken_for_a_refusal() -> None:
    async def story(scene: Scene) -> None:
        scene.work.fail["prepare"] = ZeroDivisionError()
        await scene.hear(MOVE)
        with pytest.raises(ExceptionGroup):
            await scene.running
        assert scene.said == []

    play(story)


def test_an_abort_cancels_what_is_being_prepared_and_brought_for_it() -> None:
    async def story(scene: Scene) -> None:
        scene.work.hold = {"prepare": asyncio.Event(), "announced": asyncio.Event()}
        await scene.hear(m.Announce(NEW), MOVE)
        assert scene.work.calls == ["announced"], "prepare comes after the background part"
        scene.work.hold["announced"].set()
        await settled()
        await scene.hear(m.Abort(1, "Node 1 refused"))
        assert scene.work.calls == ["announced", "prepare", "prepare cancelled", "abort"]
        assert scene.said == [m.Staged(1)]
        assert scene.windows[0].aborted and scene.windows[0].reason == "Aborted: Node 1 refused"
        assert scene.windows[0].prestage_ms is None and scene.windows[0].commit_ms is None

    play(story)


def test_a_noop_that_is_aborted_leaves_the_background_alone_and_a_move_does_not() -> None:
    async def story(scene: Scene) -> None:
        scene.work.hold["announced"] = asyncio.Event()
        await scene.hear(m.Announce(NEW), NOOP, m.Abort(1, "x"))
        assert scene.work.calls == ["announced", "prepare", "abort"]
        await scene.hear(m.Prepare(2, 1, "auto", NEW), m.Abort(2, "x"))
        assert scene.work.calls[3:] == ["announced cancelled", "abort"]
        assert scene.said == [m.Prepared(1)]

    play(story)


def test_what_cannot_be_brought_is_told_and_another_announcement_takes_its_place() -> None:
    async def story(scene: Scene) -> None:
        scene.work.fail["announced"] = OSError("no such file")
        await scene.hear(m.Announce(NEW))
        assert scene.said == [m.Staged(1, "no such file")]
        scene.work.fail.clear()
        scene.work.hold["announced"] = asyncio.Event()
        await scene.hear(m.Announce(NEW), m.Announce(shift(OLD, 1, -1)))
        assert scene.work.calls[1:] == ["announced", "announced cancelled", "announced"]

    play(story)


def test_a_newer_barrier_replaces_one_whose_abort_was_not_heard() -> None:
    async def story(scene: Scene) -> None:
        await scene.hear(MOVE, m.Prepare(2, 0, "noop"), m.Commit(2, 0))
        assert scene.said == [m.Prepared(1), m.Prepared(2), m.Done(2)]
        assert scene.work.calls == ["prepare", "abort", "prepare", "commit"]
        assert [(w.seq, w.aborted) for w in scene.windows] == [(1, True), (2, False)]

    play(story)


def test_after_ready_without_word_it_stops_state_unknown() -> None:
    async def story(scene: Scene) -> None:
        await scene.hear(MOVE)
        with pytest.raises(PeerLostError, match=r"neither COMMIT nor ABORT.*'prepared' of barrier 1; state unknown"):
            await scene.running
        assert scene.work.calls == ["prepare"], "it neither applies nor drops"

    play(story, timeout=0.05)


def test_work_that_takes_too_long_is_refused() -> None:
    async def story(scene: Scene) -> None:
        scene.work.hold["prepare"] = asyncio.Event()
        await scene.hear(MOVE)
        while not scene.said:
            await asyncio.sleep(0.01)
        assert isinstance(scene.said[0], m.Nack) and "not ready in time" in scene.said[0].reason
        assert scene.work.calls == ["prepare", "prepare cancelled", "abort"]

    play(story, timeout=0.05)


def test_word_in_time_stops_the_clock() -> None:
    async def story(scene: Scene) -> None:
        await scene.hear(NOOP, m.Commit(1, 0), m.Prepare(2, 0, "noop"), m.Abort(2, "x"))
        await asyncio.sleep(0.15)
        assert not scene.running.done()

    play(story, timeout=0.05)


@pytest.mark.parametrize(
    ("before", "where"), [([], "idle"), ([MOVE], "prepared"), ([MOVE, m.Commit(1, 1), m.Finish(1)], "idle")]
)
def test_a_lost_head_is_told_with_the_state(before: list[m.Any], where: str) -> None:
    async def story(scene: Scene) -> None:
        await scene.hear(*before)
        scene.follower.lost("Connection reset.")
        with pytest.raises(PeerLostError, match=f"The head was lost: Connection reset in state '{where}'"):
            await scene.running

    play(story)


def test_the_heads_trouble_and_a_broken_line_are_losses_of_the_head() -> None:
    async def story(scene: Scene) -> None:
        scene.broken = NetworkError("The hub is gone")
        await scene.hear(NOOP)
        with pytest.raises(PeerLostError, match="The hub is gone in state 'prepared' of barrier 1; state unknown"):
            await scene.running

    async def told(scene: Scene) -> None:
        await scene.hear(NOOP, m.Trouble(3, "Node 1 was lost in state 'committing' of barrier 1"))
        with pytest.raises(PeerLostError, match="The head was lost: Node 1 was lost in state 'committing'"):
            await scene.running

    play(story)
    play(told)


def test_what_was_committed_and_cannot_be_applied_stops_the_stage() -> None:
    async def story(scene: Scene) -> None:
        scene.work.fail["commit (3,)"] = OSError("disk full")
        await scene.hear(MOVE, m.Commit(1, 1))
        with pytest.raises(NetworkError, match="This stage failed: disk full in state 'committed'") as caught:
            await scene.running
        assert not isinstance(caught.value, PeerLostError), "it is the cause, not a consequence"
        assert scene.said == [m.Prepared(1)]

    play(story)


@pytest.mark.parametrize("out_of_turn", [m.Commit(1, 0), m.Commit(4, 1)])
def test_a_commit_that_was_not_prepared_stops_the_stage(out_of_turn: m.Any) -> None:
    async def story(scene: Scene) -> None:
        await scene.hear(out_of_turn)
        with pytest.raises(ProtocolError, match=r"The head said COMMIT of barrier \d out of turn"):
            await scene.running
        assert scene.work.calls == []

    play(story)


def test_other_messages_are_not_for_it() -> None:
    async def story(scene: Scene) -> None:
        with pytest.raises(ProtocolError, match="A Done message came from the coordinator"):
            scene.follower.hear(m.Done(1))

    play(story)
