"""The head with memory between it and its stages: sessions side by side, sessions that leave, rings that break."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from splitlm.core.errors import NetworkError, ProtocolError, SplitlmError
from splitlm.core.sampling import Sampling
from splitlm.infer.request import Request
from splitlm.model import payload
from splitlm.telemetry.record import Step
from splitlm.wire.frame import Close, Hidden, Open, Spec, Token
from tests.infer.rig import Rig, ring

PROMPTS = [(1, 40, 41, 42, 43, 44, 45, 46, 47), (1, 50), (1, 60, 61, 62, 63), (1, 70, 71)]
CUTS = [((2, 4), False), ((2, 4), True), ((0, 3), True)]


def run(
    folder: Path,
    boundaries: tuple[int, ...],
    story: Callable[[Rig], Awaitable[None]],
    *,
    private: bool = False,
    delay_s: float = 0.0,
) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), ring(folder, boundaries, private=private, delay_s=delay_s) as rig:
            await story(rig)

    asyncio.run(main())


def uncut(folder: Path, requests: list[Request]) -> list[list[int]]:
    """One after the other, through one segment."""
    found: list[list[int]] = []

    async def story(rig: Rig) -> None:
        for request in requests:
            found.append(await rig.tokens(request))

    run(folder, (), story)
    return found


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(("boundaries", "private"), CUTS)
@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_sessions_side_by_side_give_what_each_gives_alone(
    tiny: Callable[[str], Path], boundaries: tuple[int, ...], private: bool, penalty: float
) -> None:
    folder = tiny("llama")
    requests = [Request(prompt, 12, Sampling(repetition_penalty=penalty)) for prompt in PROMPTS]
    alone = uncut(folder, requests)
    assert len({tuple(tokens) for tokens in alone}) == len(PROMPTS)

    async def story(rig: Rig) -> None:
        assert await asyncio.gather(*map(rig.tokens, requests)) == alone
        await until(lambda: not rig.open_sessions)
        for seen in rig.seen:
            assert [type(h) for h in seen].count(Close) == len(PROMPTS)
            if private:  # no prompt leaves the machine, not even for the repetition penalty
                assert all(not h.tensors for h in seen if isinstance(h, Open))
            # The sessions took turns; none waited until another was done.
            order = [h.session for h in seen if isinstance(h, Hidden)]
            assert order != sorted(order)

    run(folder, boundaries, story, private=private)


@pytest.mark.parametrize(("boundaries", "private"), CUTS)
def test_a_session_that_is_left_in_the_middle_leaves_nothing_and_disturbs_nobody(
    tiny: Callable[[str], Path], boundaries: tuple[int, ...], private: bool
) -> None:
    folder = tiny("llama")
    stays = Request(PROMPTS[1], 30)
    (expected,) = uncut(folder, [stays])

    async def leave(rig: Rig, after: int) -> None:
        stream = rig.head.generate(Request(PROMPTS[0], 100))
        async for item in stream:
            if item.index == after:
                break
        before = len(rig.seen[0])
        while after and len(rig.seen[0]) == before:  # else it goes before its next lap has begun
            await asyncio.sleep(0)
        await stream.aclose()

    async def drop(rig: Rig, turns: int) -> None:
        task = asyncio.create_task(rig.tokens(Request(PROMPTS[0] * 10, 5)))
        for _ in range(turns):  # in the prompt's chunks, or before its first
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def story(rig: Rig) -> None:
        await drop(rig, 0)  # the very first frames of the ring belong to a session that is gone
        whole = asyncio.create_task(rig.tokens(stays))
        await asyncio.gather(*(leave(rig, n) for n in range(4)), *(drop(rig, n) for n in (0, 1, 2, 3, 5, 8, 13)))
        assert await whole == expected
        await until(lambda: not rig.open_sessions)
        assert await rig.tokens(stays) == expected
        # Of laps that nobody waited for too.
        sent = [h.position for h in rig.seen[0] if isinstance(h, Hidden)]
        told = [step.position for step in rig.records if isinstance(step, Step) and step.segment is None]
        assert sorted(told) == sorted(sent)

    run(folder, boundaries, story, private=private, delay_s=0.001)


def test_an_error_of_a_callers_own_function_ends_its_session_alone(tiny: Callable[[str], Path]) -> None:
    folder = tiny("llama")
    stays = Request(PROMPTS[1], 20)
    (expected,) = uncut(folder, [stays])

    def breaks(token: int) -> None:
        raise ZeroDivisionError(token)

    async def story(rig: Rig) -> None:
        good = asyncio.create_task(rig.tokens(stays))
        with pytest.raises(ZeroDivisionError):
            await rig.tokens(Request(PROMPTS[0], 20, accept=breaks))
        assert await good == expected
        await until(lambda: not rig.open_sessions)

    run(folder, (2, 4), story)


def test_a_broken_ring_tells_every_session_and_all_that_come_later_the_same(tiny: Callable[[str], Path]) -> None:
    async def story(rig: Rig) -> None:
        tasks = [asyncio.create_task(rig.tokens(Request(prompt, 100))) for prompt in PROMPTS]
        await until(lambda: len(rig.seen[1]) > 20)
        rig.head.fail(NetworkError("Node 2 is gone"))
        rig.head.fail(NetworkError("A later reason"))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(2):
            with pytest.raises(NetworkError) as caught:
                await rig.tokens(Request((1,), 1))
            results.append(caught.value)
        assert {str(result) for result in results} == {"Node 2 is gone."}
        depth, trace = 0, results[-1].__traceback__  # type: ignore[union-attr]
        while trace is not None:
            depth, trace = depth + 1, trace.tb_next
        assert depth < 10  # each raise starts anew

    run(tiny("llama"), (2, 4), story, delay_s=0.001)


def spec_of(tensor: torch.Tensor) -> tuple[tuple[Spec, ...], list[memoryview]]:
    spec, view = payload.dump(tensor)
    return (spec,), [view]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"position": 1}, "came for position 1"),
        ({"position": 99}, "came for position 99"),
        ({"token": -1}, "Token -1"),
        ({"token": 128}, "ids below 128"),
        ({"epoch": 1}, "epoch 0"),
        ({"tensors": torch.zeros(127)}, r"\[127\]"),
        ({"tensors": torch.zeros(128, dtype=torch.int64)}, "int64"),
    ],
)
def test_a_token_that_cannot_be_right_ends_the_ring(
    tiny: Callable[[str], Path], change: dict[str, object], says: str
) -> None:
    """A stage far ahead: it sends a token of its own for the open session."""

    async def story(rig: Rig) -> None:
        task = asyncio.create_task(rig.tokens(Request((1, 2), 100)))
        await until(lambda: bool(rig.seen[0]))
        views: list[memoryview] = []
        fields: dict[str, object] = {"session": 1, "epoch": 0, "position": 2, "token": 5, **change}
        if isinstance(change.get("tensors"), torch.Tensor):
            fields["tensors"], views = spec_of(change["tensors"])  # type: ignore[arg-type]
        await rig.links[-1][0].send(Token(**fields), views)  # type: ignore[arg-type]
        with pytest.raises(ProtocolError, match=says):
            await task

    run(tiny("llama"), (2, 4), story, delay_s=0.2)


def test_a_late_token_of_a_session_that_ended_is_no_error(tiny: Callable[[str], Path]) -> None:
    async def story(rig: Rig) -> None:
        assert len(await rig.tokens(Request((1, 2), 3))) == 3
        await rig.links[-1][0].send(Token(session=1, epoch=0, position=5, token=5))
        await rig.links[-1][0].send(Token(session=77, epoch=0, position=5, token=5))
        assert len(await rig.tokens(Request((1, 2), 3))) == 3

    run(tiny("llama"), (2, 4), story)


def test_hidden_states_have_no_way_home_to_a_head_without_a_tail(tiny: Callable[[str], Path]) -> None:
    async def story(rig: Rig) -> None:
        task = asyncio.create_task(rig.tokens(Request((1, 2), 100)))
        link = rig.links[-1][0]
        await link.send(Open(session=1, context=128, sampling=Sampling()))
        with pytest.raises(ProtocolError, match="Open frame came home"):
            await task

    run(tiny("llama"), (2, 4), story, delay_s=0.5)


def test_a_stage_that_goes_is_an_error_of_the_run_and_never_a_token(tiny: Callable[[str], Path]) -> None:
    async def story(rig: Rig) -> None:
        task = asyncio.create_task(rig.tokens(Request((1, 2), 100)))
        await until(lambda: len(rig.seen[0]) > 5)
        rig.links[-1][0].cut()
        with pytest.raises(SplitlmError, match=r"node 2 .*went away|node 2.*lost"):
            await task

    run(tiny("llama"), (2, 4), story, delay_s=0.001)
