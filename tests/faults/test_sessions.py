"""Sessions that fail in rings of threads over TCP: all others give what they give alone, and the ring goes on."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from splitlm import Ring
from splitlm.core.errors import ModelError, SplitlmError
from splitlm.core.shifts import Shift
from splitlm.infer.head import Head
from splitlm.migrate.mover import Mover
from splitlm.model.stage import Stage
from splitlm.node.thread import LoopThread
from splitlm.node.window import Windows
from splitlm.telemetry.record import Session
from splitlm.telemetry.sinks import read_trace, trace_path
from tests.faults.scene import ThreadStage, Wounded, fixed, free_ports, nothing_left, settings, until

pytestmark = pytest.mark.timeout(90)
BLOCKS = [(0, 2), (2, 4), (4, -1)]
POISON = 0
"""A token whose embedding is not finite."""
GOOD = [[1, 40, 41, 42, 43, 44, 45], [1, 50, 51]]
BAD = [1, 60, 61, 62, 63, 64, 65, POISON, 66, 67, 68, 69, 70, 71]
NEW = 40


@pytest.fixture(scope="module")
def poisoned(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with an infinity in a row that only one prompt uses."""
    folder = tmp_path_factory.mktemp("poisoned") / "model"
    shutil.copytree(tiny("llama-untied"), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = torch.inf
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tokens(ring: Ring, prompt: list[int], new: int = NEW) -> list[int]:
    return ring.generate(prompt, max_new_tokens=new, ignore_eos=True).tokens


@pytest.fixture(scope="module")
def alone(poisoned: Path) -> list[list[int]]:
    """What the good prompts give in one process; none of it is the poisoned token."""
    with Ring(str(poisoned), threads=1, prefill_chunk=4) as ring:
        found = [tokens(ring, prompt) for prompt in GOOD]
    assert not any(POISON in made for made in found)
    return found


class Failing:
    """From ``position`` on, steps of ``session`` find no memory on ``node``; ``first`` is called before that."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.node, self.session, self.position = -1, -1, 0
        self.first: Callable[[], object] = lambda: None
        forward = Stage.forward

        def failing(stage: Stage, session: int, inputs: torch.Tensor, position: int, **rest: Any) -> Any:
            out = forward(stage, session, inputs, position, **rest)
            node = 0 if stage.segment.embed else 2 if stage.segment.head else 1
            if (node, session) == (self.node, self.session) and position >= self.position:
                self.first()
                raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes.")
            return out

        patch.setattr(Stage, "forward", failing)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    return Failing(monkeypatch)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Stage]]:
    """Every stage that computes, by the order of its first step."""
    found: list[Stage] = []
    forward = Stage.forward

    def noted(stage: Stage, *args: Any, **rest: Any) -> Any:
        if stage not in found:
            found.append(stage)
        return forward(stage, *args, **rest)

    monkeypatch.setattr(Stage, "forward", noted)
    yield found


def error_of(job: Future[list[int]]) -> SplitlmError:
    with pytest.raises(SplitlmError) as caught:
        job.result(60)
    return caught.value


@pytest.mark.parametrize("private", [False, True])
def test_a_prompt_that_makes_no_finite_logits_ends_alone(
    private: bool, poisoned: Path, alone: list[list[int]], stages: list[Stage], tmp_path: Path
) -> None:
    with nothing_left():
        ring, threads, _ = fixed(poisoned, BLOCKS, private=private, prefill_chunk=4, trace_dir=tmp_path)
        with ring, ThreadPoolExecutor(3) as pool:
            jobs = [pool.submit(tokens, ring, prompt) for prompt in (GOOD[0], BAD, GOOD[1])]
            error = error_of(jobs.pop(1))
            assert type(error) is ModelError
            assert f"the logits for position {len(BAD)} hold a nan" in str(error)
            assert str(error).startswith("node 0 (" if private else "node 2 (block 4 + head): Session ")
            assert [job.result(60) for job in jobs] == alone
            assert ring.error is None
            assert tokens(ring, GOOD[0]) == alone[0]
            assert until(lambda: not any(stage.sessions for stage in stages))
            assert len(stages) == 3 + private
        assert [thread.join() for thread in threads] == [None, None]
    records = [record for record in read_trace(trace_path(tmp_path, 0)) if isinstance(record, Session)]
    assert sorted(record.finish for record in records) == ["failed", "length", "length", "length"]
    assert {record.reason for record in records} == {None, str(error)}


def test_the_uncut_model_goes_on_too(poisoned: Path, alone: list[list[int]]) -> None:
    with Ring(str(poisoned), threads=1, prefill_chunk=4) as ring, ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(tokens, ring, prompt) for prompt in (GOOD[0], BAD, GOOD[1])]
        error = error_of(jobs.pop(1))
        assert type(error) is ModelError
        assert str(error).startswith("node 0 (embedding + blocks 0–4 + head): Session ")
        assert [job.result(60) for job in jobs] == alone
        assert tokens(ring, GOOD[1]) == alone[1]


@pytest.mark.parametrize("node", [0, 1, 2])
@pytest.mark.parametrize("position", [4, len(BAD) + 5])
def test_a_session_without_memory_on_one_stage_ends_alone(
    node: int, position: int, poisoned: Path, alone: list[list[int]], failing: Failing, stages: list[Stage]
) -> None:
    failing.node, failing.session, failing.position = node, 1, position
    bad = [token if token != POISON else 72 for token in BAD]
    with nothing_left():
        ring, threads, _ = fixed(poisoned, BLOCKS, prefill_chunk=4)
        with ring, ThreadPoolExecutor(3) as pool:
            first = ring.stream(bad, max_new_tokens=NEW, ignore_eos=True)
            job = pool.submit(lambda: [len(piece) for piece in first])
            assert until(lambda: bool(stages))  # so that it is session 1
            jobs = [pool.submit(tokens, ring, prompt) for prompt in GOOD]
            error = error_of(job)
            assert str(error).startswith(f"node {node} (")
            assert "Session 1, position" in str(error)
            assert "memory ran out" in str(error)
            assert [job.result(60) for job in jobs] == alone
            assert tokens(ring, GOOD[0]) == alone[0]
            assert until(lambda: not any(stage.sessions for stage in stages))
        assert [thread.join() for thread in threads] == [None, None]


def moving(model: Path, shifts: list[Shift]) -> tuple[Wounded, list[ThreadStage]]:
    """A ring of three that moves blocks."""
    (port,) = free_ports(1)
    host = "127.0.0.1"
    ring = Wounded(model, listen=(host, port), token="t", cuts=(2, 4), window=5, shifts=shifts, prefill_chunk=4)
    return ring, [ThreadStage(settings(port, model=str(model))) for _ in range(2)]


def _inside(ring: Ring) -> tuple[Head, Windows, LoopThread]:
    assert ring._head is not None
    assert ring._host is not None
    assert ring._host._lead_of is not None
    assert ring._thread is not None
    return ring._head, ring._host._lead_of.windows, ring._thread


@pytest.mark.parametrize("boundary", [1, 2])
@pytest.mark.parametrize("node", [0, 1, 2])
def test_a_session_that_fails_as_the_ring_drains_for_a_move_does_not_stop_the_move(
    boundary: int,
    node: int,
    poisoned: Path,
    alone: list[list[int]],
    failing: Failing,
    stages: list[Stage],
) -> None:
    """The fence of a boundary is under way when a step of session 3 fails: some stages know it then, others do not."""
    bad = [token if token != POISON else 72 for token in BAD]
    shifts = [Shift(5 * (i + 1), boundary, (-1) ** (i + 1)) for i in range(6)]
    failing.node, failing.session, failing.position = node, 3, len(bad) + 6
    with nothing_left():
        ring, threads = moving(poisoned, shifts)
        with ring, ThreadPoolExecutor(3) as pool:
            head, windows, loop = _inside(ring)

            async def due() -> None:
                head.hold()
                windows._riding.set()  # no token may have come home since the last boundary
                windows._due.set()
                while head._gate._passed is None or head._gate._passed.done():
                    await asyncio.sleep(0.001)

            failing.first = lambda: loop.call(due())
            jobs = [pool.submit(tokens, ring, prompt) for prompt in GOOD]
            assert until(lambda: len(head._sessions) == 2)
            error = error_of(pool.submit(tokens, ring, bad, 100))
            assert str(error).startswith(f"node {node} (")
            assert "Session 3, position" in str(error)
            assert [job.result(60) for job in jobs] == alone
            assert tokens(ring, GOOD[0]) == alone[0]
            assert ring.cut.epoch == len(shifts)
            assert not any(each.outcome.aborted for each in ring.boundaries)
            assert head._gate._number == len(ring.boundaries) + 1
            assert until(lambda: not any(stage.sessions for stage in stages))
        assert [thread.join() for thread in threads] == [None, None]


def test_memory_that_runs_out_beside_the_sessions_ends_the_ring_in_words(
    poisoned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in a step of one session: nobody can say what is still whole."""

    def apply(*_: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes.")

    monkeypatch.setattr(Mover, "_apply", apply)
    with nothing_left():
        ring, threads = moving(poisoned, [Shift(5, 1, 1)])
        with ring:
            with pytest.raises(SplitlmError) as caught:
                tokens(ring, GOOD[0])
            assert "Memory ran out (RuntimeError: DefaultCPUAllocator" in str(caught.value)
        for thread in threads:
            assert isinstance(thread.join(), SplitlmError)
