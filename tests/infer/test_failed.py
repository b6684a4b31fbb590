"""A step that fails by its session's own fault ends that session, on every stage, and no other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from splitlm.core.cut import make_cut
from splitlm.core.errors import ModelError, NetworkError, ProtocolError, SplitlmError
from splitlm.core.sampling import Sampling
from splitlm.infer.request import Request
from splitlm.infer.session import MAX_REASON, error_of
from splitlm.model import payload
from splitlm.model.load import ModelFiles
from splitlm.model.sampling import Sampler
from splitlm.model.stage import Stage
from splitlm.telemetry.record import Record
from splitlm.telemetry.record import Session as SessionRecord
from splitlm.wire.frame import Close, Failed, Fence, Frame, Hidden, Open
from tests.infer.rig import Rig, relays
from tests.infer.test_head import PROMPTS, run, uncut, until

LONG = (1, *range(20, 50))
"""Eight chunks."""
NO_ROOM = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
)
WAYS = [((), False), ((2, 4), False), ((2, 4), True), ((0, 3), True)]
PLACES = [(0, False), (2, False), (4, False), (0, True), (2, True), (4, True), (5, True)]
"""First block of each segment of ``(2, 4)``, and whether the ring is private."""
NODES = {0: 0, 2: 1, 4: 2, 5: 0}

Hurt = Callable[[int, int, int], BaseException | None]


@contextlib.contextmanager
def hurt(what: Hurt) -> Iterator[None]:
    """Each step raises what ``what(session, position, first block)`` gives; its rows are in the cache by then."""
    forward = Stage.forward

    def failing(self: Stage, session: int, inputs: torch.Tensor, position: int, **rest: Any) -> torch.Tensor | None:
        out = forward(self, session, inputs, position, **rest)
        error = what(session, position, self.segment.begin)
        if error is not None:
            raise error
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage, "forward", failing)
        yield


class Kept:
    def __init__(self) -> None:
        self.sessions: list[SessionRecord] = []

    def write(self, record: Record) -> None:
        if isinstance(record, SessionRecord):
            self.sessions.append(record)

    @property
    def dropped(self) -> int:
        return 0

    def close(self) -> None:
        pass


async def failure(rig: Rig, request: Request) -> SplitlmError:
    with pytest.raises(SplitlmError) as caught:
        await rig.tokens(request)
    return caught.value


@pytest.mark.parametrize(("boundaries", "private"), WAYS)
def test_logits_that_are_not_finite_end_their_session_alone(
    tiny: Callable[[str], Path], boundaries: tuple[int, ...], private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny("llama")
    others = [Request(prompt, 12) for prompt in PROMPTS[:3]]
    alone = uncut(folder, others)
    choose = Sampler.next

    def poisoned(self: Sampler, logits: torch.Tensor, position: int | None = None) -> int:
        bad = self.sampling.temperature == 7.0 and position == len(LONG) + 2
        return choose(self, logits * torch.nan if bad else logits, position)

    monkeypatch.setattr(Sampler, "next", poisoned)

    async def story(rig: Rig) -> None:
        kept = rig.head._meter.sink = Kept()
        sampling = Sampling(temperature=7.0, seed=1)
        got: list[int] = []

        async def bad() -> None:
            async for item in rig.head.generate(Request(LONG, 12, sampling)):
                got.append(item.token)

        task = asyncio.create_task(bad())
        assert await asyncio.gather(*map(rig.tokens, others)) == alone
        with pytest.raises(ModelError) as caught:
            await task
        last = 0 if private else len(boundaries)
        assert str(caught.value).startswith(f"node {last} (")
        assert f"Session 1: the logits for position {len(LONG) + 2} hold a nan" in str(caught.value)
        assert "Expected finite numbers. Check the checkpoint" in str(caught.value)
        assert len(got) == 2
        await until(lambda: not rig.open_sessions)
        assert await rig.tokens(others[0]) == alone[0]
        (record,) = [record for record in kept.sessions if record.session == 1]
        assert (record.finish, record.new_tokens, record.reason) == ("failed", 2, str(caught.value))
        assert [r.finish for r in kept.sessions].count("length") == 4
        assert all(not relay._failed for node in rig.stages for relay in node)

    run(folder, boundaries, story, private=private)


@pytest.mark.parametrize(
    ("at", "kind"),
    [(0, RuntimeError), (8, MemoryError), (28, torch.OutOfMemoryError), (len(LONG) + 2, RuntimeError)],
)
@pytest.mark.parametrize(("begin", "private"), PLACES)
def test_memory_that_runs_out_for_one_session_ends_it_alone_wherever_it_is(
    tiny: Callable[[str], Path], begin: int, at: int, private: bool, kind: type[Exception]
) -> None:
    """In the first chunk, while later ones are on their way; in the last; and between two tokens."""
    folder = tiny("llama")
    others = [Request(prompt, 12) for prompt in PROMPTS[1:3]]
    alone = uncut(folder, others)

    def what(session: int, position: int, first: int) -> Exception | None:
        return kind(f"{NO_ROOM} 64 bytes") if (session, position, first) == (1, at, begin) else None

    async def story(rig: Rig) -> None:
        bad = asyncio.create_task(failure(rig, Request(LONG, 12)))
        assert await asyncio.gather(*map(rig.tokens, others)) == alone
        error = await bad
        node = NODES[begin]
        assert type(error) is SplitlmError
        assert error.exit_code == 1
        rows = f"position {at}" if at > len(LONG) else f"positions {at} to {min(at + 4, len(LONG)) - 1}"
        assert str(error).startswith(f"node {node} (")
        assert f"Session 1, {rows}: memory ran out ({kind.__name__}" in str(error)
        await until(lambda: not rig.open_sessions)
        assert await rig.tokens(others[0]) == alone[0]
        assert all(not relay._failed for stages in rig.stages for relay in stages)
        for i, seen in enumerate(rig.seen):  # nodes 1 and 2
            after = [type(h) for h in seen if getattr(h, "session", 0) == 1]
            assert after.count(Close) == 1
            assert after.count(Failed) == (1 if 0 < node <= i else 0)
            if Failed in after:  # what came behind the failed step was dropped there
                assert Hidden not in after[after.index(Failed) :]

    with hurt(what):
        run(folder, (2, 4), story, private=private)


def test_two_stages_that_fail_for_one_session_end_it_once(tiny: Callable[[str], Path]) -> None:
    """The later stage at the first chunk, the earlier one at the second, before it hears of that."""

    def what(session: int, position: int, first: int) -> Exception | None:
        return MemoryError() if session == 1 and (first, position) in ((4, 0), (2, 4)) else None

    async def story(rig: Rig) -> None:
        error = await failure(rig, Request(LONG, 12))
        assert "node 2" in str(error)
        await until(lambda: not rig.open_sessions)
        assert len(await rig.tokens(Request((1, 50), 5))) == 5

    with hurt(what):
        run(tiny("llama"), (2, 4), story)


@pytest.mark.parametrize("error", [RuntimeError("The size of tensor a must match"), ProtocolError("Out of place")])
def test_a_fault_that_is_not_the_sessions_own_is_raised(tiny: Callable[[str], Path], error: Exception) -> None:
    files = ModelFiles(tiny("llama"))
    (relay,) = relays(files, make_cut(files.blocks, (2, 4)), 0)
    relay.handle(Frame(Open(session=1, context=9, sampling=Sampling())))
    spec, view = payload.dump(torch.tensor([[5, 6]]))
    with hurt(lambda *_: error), pytest.raises(type(error)) as caught:
        relay.handle(Frame(Hidden(session=1, epoch=0, position=0, sample=True, tensors=(spec,)), [view]))
    assert caught.value is error
    assert relay.stage.sessions == [1]


def test_a_broken_ring_leaves_a_record_of_every_session(tiny: Callable[[str], Path]) -> None:
    async def story(rig: Rig) -> None:
        kept = rig.head._meter.sink = Kept()
        tasks = [asyncio.create_task(rig.tokens(Request(prompt, 100))) for prompt in PROMPTS]
        await until(lambda: len(rig.seen[1]) > 20)
        rig.head.fail(NetworkError("Node 2 is gone"))
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [r.session for r in kept.sessions] == [1, 2, 3, 4]
        assert {(r.finish, r.reason) for r in kept.sessions} == {("failed", "Node 2 is gone.")}

    run(tiny("llama"), (2, 4), story, delay_s=0.001)


@pytest.mark.parametrize(("begin", "private"), PLACES)
def test_a_session_that_fails_while_the_ring_drains_is_closed_everywhere_before_it_stands_still(
    tiny: Callable[[str], Path], begin: int, private: bool
) -> None:
    """The stages then know the same sessions and tokens, as a move of blocks needs it."""
    folder = tiny("llama")
    stays = Request((1, 50), 40)
    (expected,) = uncut(folder, [stays])
    drain: list[Callable[[], Coroutine[Any, Any, None]]] = []
    loops: list[asyncio.AbstractEventLoop] = []

    def what(session: int, position: int, first: int) -> Exception | None:
        """On the compute thread: the fence is on its way before the step fails."""
        if (session, first) != (1, begin) or position < len(LONG) + 2:
            return None
        asyncio.run_coroutine_threadsafe(drain[0](), loops[0]).result(10)
        return MemoryError()

    async def story(rig: Rig) -> None:
        drained = asyncio.Event()
        tasks: list[asyncio.Task[Any]] = []
        states: list[dict[int, int]] = []

        async def stand() -> None:
            await rig.head.drained()
            for node in rig.stages:
                states.extend({s: relay.stage.seen(s) for s in relay.stage.sessions} for relay in node)
            drained.set()

        async def begins() -> None:
            rig.head.hold()
            tasks.append(asyncio.create_task(stand()))
            tasks.append(asyncio.create_task(rig.tokens(Request((1, 60), 3))))
            await asyncio.sleep(0)

        loops.append(asyncio.get_running_loop())
        drain.append(begins)
        bad = asyncio.create_task(failure(rig, Request(LONG, 60)))
        good = asyncio.create_task(rig.tokens(stays))
        await drained.wait()
        assert "memory ran out" in str(await bad)
        assert all(state == states[0] for state in states), states
        assert sum(isinstance(h, Fence) for h in rig.seen[1]) == 2
        assert not good.done()
        rig.head.resume()
        assert await good == expected
        await tasks[0]
        assert len(await tasks[1]) == 3
        await until(lambda: not rig.open_sessions)

    with hurt(what):
        run(folder, (2, 4), story, private=private)


def test_a_failure_of_a_session_that_was_left_is_no_error(tiny: Callable[[str], Path]) -> None:
    async def story(rig: Rig) -> None:
        assert len(await rig.tokens(Request((1, 2), 3))) == 3
        await rig.links[-1][0].send(Failed(session=1, code=4, reason="late"))
        await rig.links[-1][0].send(Failed(session=77, code=4, reason="never was"))
        assert len(await rig.tokens(Request((1, 2), 3))) == 3

    run(tiny("llama"), (2, 4), story)


def test_steps_of_a_session_that_a_passing_failure_ended_are_refused(tiny: Callable[[str], Path]) -> None:
    """Only who failed itself may still be sent some: the stage before it sends a failure after its last step."""

    async def story(rig: Rig) -> None:
        task = asyncio.create_task(rig.tokens(Request((1, 2), 100)))
        await until(lambda: bool(rig.seen[1]))
        relay = rig.stages[2][0]
        step = relay.handle(Frame(Failed(session=1, code=1, reason="no")))
        assert step.header == Failed(session=1, code=1, reason="no")
        assert relay.stage.sessions == []
        with pytest.raises(ProtocolError, match="Session 1 is not open"):
            relay.handle(Frame(Hidden(session=1, epoch=0, position=0, sample=True)))
        task.cancel()

    run(tiny("llama"), (2, 4), story, delay_s=0.2)


@pytest.mark.parametrize(("code", "kind"), [(4, ModelError), (1, SplitlmError), (99, SplitlmError), (3, NetworkError)])
def test_what_a_stage_says_is_shown_without_control_characters_and_not_at_any_length(
    code: int, kind: type[SplitlmError]
) -> None:
    error = error_of(Failed(session=1, code=code, reason="bad \x1b[31m" + "x" * 5000))
    assert type(error) is kind
    assert "\x1b" not in str(error)
    assert len(str(error)) < MAX_REASON + 5
