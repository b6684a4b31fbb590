"""Several sessions in one ring: they overlap, they do not disturb each other, and they leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median

import pytest
import torch

from splitlm.core.sampling import Sampling
from splitlm.infer.request import Request
from splitlm.link.base import StreamChannel
from splitlm.local import Generation, Ring
from splitlm.model.load import ModelFiles
from splitlm.model.uncut import Uncut
from splitlm.telemetry.record import Session, StageMeta, Step
from splitlm.telemetry.sinks import read_trace
from splitlm.telemetry.summary import lap_errors
from splitlm.wire.frame import Header, Hidden, Open, Token
from tests.infer.rig import ring as memory_ring
from tests.parity.chain import long_prompt
from tests.tiny import CONTEXT, HIDDEN, VOCAB

pytestmark = pytest.mark.usefixtures("forks")
PACE_MS = 10.0
THREADS = 2
"""Other than the one that the environment of all tests says, so that it must have been told to the stages."""
CUTS = (2, 4)
PROMPTS = [long_prompt(length, seed) for seed, length in enumerate((3, 11, 20, 33))]
NEW = 16
SAMPLED = Sampling(temperature=1.0, top_k=20, top_p=0.95, seed=7)


@dataclass
class Ran:
    """One ring of three processes, each a simulated device, and everything that was done with it."""

    folder: Path
    alone: Generation
    together: list[Generation]
    left: list[str]
    beside: Generation
    seeded: list[Generation]
    ends: dict[str, Generation]
    steps: list[Step]
    sessions: list[Session]
    metas: list[StageMeta]

    def of(self, *numbers: int) -> list[Step]:
        return [step for step in self.steps if step.session in numbers]


@pytest.fixture(scope="module")
def ran(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    trace = tmp_path_factory.mktemp("trace")
    folder = tiny("llama")
    with (
        Ring(str(folder), cuts=CUTS, threads=THREADS, pace_ms=PACE_MS, prefill_chunk=16, trace_dir=trace) as ring,
        ThreadPoolExecutor(4) as pool,
    ):

        def generate(prompt: list[int], new: int = NEW, **options: object) -> Generation:
            return ring.generate(prompt, max_new_tokens=new, **{"ignore_eos": True, **options})  # type: ignore[arg-type]

        alone = generate(PROMPTS[1])  # session 1
        together = list(pool.map(generate, PROMPTS))  # sessions 2 to 5
        other = pool.submit(generate, PROMPTS[2], 24)
        left = []
        for piece in ring.stream(PROMPTS[3], max_new_tokens=60, ignore_eos=True):
            left.append(piece)
            if len(left) == 3:
                break
        beside = other.result()
        seeded = [generate(PROMPTS[0], sampling=SAMPLED) for _ in range(2)]
        ends = {"context": generate(long_prompt(CONTEXT - 3), 50), "length": generate(PROMPTS[0], 1)}
        ends["stop"] = generate(PROMPTS[1], stop=[alone.text[4:7]])
        ring.codec.eos_ids = frozenset({alone.tokens[5]})
        ends["eos"] = ring.generate(PROMPTS[1], max_new_tokens=NEW)
    records = [record for path in sorted(trace.glob("trace-node*.jsonl")) for record in read_trace(path)]
    yield Ran(
        folder,
        alone,
        together,
        left,
        beside,
        seeded,
        ends,
        [r for r in records if isinstance(r, Step)],
        [r for r in records if isinstance(r, Session)],
        [r for r in records if isinstance(r, StageMeta)],
    )


def uncut(folder: Path, prompt: list[int], new: int, chunk: int = 16, sampling: Sampling | None = None) -> list[int]:
    model = Uncut(ModelFiles(folder))
    return [token for token, _ in model.generate(prompt, new, prefill_chunk=chunk, sampling=sampling)]


def overlap(a: Step, b: Step) -> int:
    return max(0, min(a.end_ns, b.end_ns) - max(a.start_ns, b.start_ns))


def test_each_of_four_sessions_gives_what_it_gives_alone(ran: Ran) -> None:
    assert ran.together[1].tokens == ran.alone.tokens
    for prompt, made in zip(PROMPTS, ran.together, strict=True):
        assert made.tokens == uncut(ran.folder, prompt, NEW)
        assert made.prompt_tokens == len(prompt)


def test_the_parts_of_a_lap_add_up_to_it_on_every_stage(ran: Ran) -> None:
    """1.4: with one session, recv_wait + queue + compute + send of each stage is the head's lap, within 5 %."""
    errors = lap_errors([step for step in ran.steps if step.session == 1])
    assert sorted(errors) == [0, 1, 2]
    assert max(errors.values()) < 0.05, errors


def test_stages_are_simulated_devices(ran: Ran) -> None:
    assert sorted(meta.node for meta in ran.metas) == [0, 1, 2]
    assert all("paced" in meta.compute and meta.threads == THREADS for meta in ran.metas)
    assert all(step.compute_ms >= PACE_MS * (1 if step.node == 2 else 2) - 0.1 for step in ran.steps)


def test_sessions_overlap_on_different_stages(ran: Ran) -> None:
    """Four sessions keep three devices busy at once; one session never does."""
    steps = ran.of(2, 3, 4, 5)
    for a, b in combinations(range(3), 2):
        both = [(x, y) for x in steps for y in steps if (x.node, y.node) == (a, b) and overlap(x, y)]
        assert {frozenset((x.session, y.session)) for x, y in both if x.session != y.session}, (a, b)
        assert not [pair for pair in both if pair[0].session == pair[1].session and not pair[0].prefill]

    def busy(chosen: list[Step]) -> float:
        """Stages that compute at a time, on average."""
        span = max(step.end_ns for step in chosen) - min(step.start_ns for step in chosen)
        return sum(step.end_ns - step.start_ns for step in chosen) / span

    assert busy(ran.of(1)) <= 1.0
    assert busy(steps) > 1.5, "of at most 2.5, as the last stage has half the work"


def test_a_stage_does_not_idle_while_a_frame_waits(ran: Ran) -> None:
    """Queue time is what passes on a free stage before it takes a frame that is there."""
    for node in range(3):
        steps = [step for step in ran.of(2, 3, 4, 5) if step.node == node]
        assert steps and median(step.queue_ms for step in steps) < PACE_MS / 2
        assert sum(step.queue_ms for step in steps) < sum(step.compute_ms for step in steps) / 2


def test_one_stage_computes_one_step_at_a_time(ran: Ran) -> None:
    for node in range(3):
        steps = sorted((step for step in ran.steps if step.node == node), key=lambda step: step.start_ns)
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(steps))


def test_kv_bytes_are_those_of_the_rows_so_far(ran: Ran) -> None:
    """2 · 2 KV heads · 16 · 4 bytes per block and token."""
    row = 2 * 2 * (HIDDEN // 4) * 4
    blocks = {meta.node: len(meta.blocks) for meta in ran.metas}
    assert [blocks[node] for node in range(3)] == [2, 2, 1]
    for step in ran.steps:
        assert step.kv_bytes == blocks[step.node] * row * (step.position + step.count)


def test_leaving_a_stream_ends_its_session_on_every_stage_and_no_other(ran: Ran) -> None:
    (cancelled,) = [session for session in ran.sessions if session.finish == "cancelled"]
    assert 3 <= cancelled.new_tokens < 20
    for node in range(3):
        made = [step for step in ran.of(cancelled.session) if step.node == node and not step.prefill]
        assert len(made) <= cancelled.new_tokens + 1, "a lap under way may end, no other begins"
    assert ran.beside.tokens == uncut(ran.folder, PROMPTS[2], 24)


def test_a_seed_gives_the_same_text_again_and_without_a_ring(ran: Ran) -> None:
    first, second = ran.seeded
    assert first.tokens == second.tokens == uncut(ran.folder, PROMPTS[0], NEW, sampling=SAMPLED)
    assert first.tokens != ran.together[0].tokens


def test_every_reason_to_end(ran: Ran) -> None:
    assert {name: made.finish for name, made in ran.ends.items()} == {name: name for name in ran.ends}
    assert len(ran.ends["length"].tokens) == 1
    assert len(ran.ends["context"].tokens) == 4, "a token for each position left, and the one that has none"
    assert ran.ends["eos"].tokens == ran.alone.tokens[: ran.alone.tokens.index(ran.alone.tokens[5]) + 1]
    stop = ran.alone.text[4:7]
    assert ran.ends["stop"].text == ran.alone.text[: ran.alone.text.index(stop)]
    assert len(ran.ends["stop"].tokens) < NEW
    finishes = [session.finish for session in ran.sessions]
    assert {"context", "length", "stop", "eos", "cancelled"} == set(finishes)


def test_a_session_that_ended_leaves_no_kv_anywhere(tiny: Callable[[str], Path]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), memory_ring(tiny("llama"), (1, 3), private=True) as rig:
            await asyncio.gather(*(rig.tokens(Request(tuple(prompt), 5)) for prompt in PROMPTS))
            stream = rig.head.generate(Request(tuple(PROMPTS[2]), 50))
            await anext(stream)
            assert rig.open_sessions and sum(r.stage.kv_bytes() for node in rig.stages for r in node) > 0
            await stream.aclose()
            for _ in range(200):  # the Close frames are under way
                if not rig.open_sessions:
                    break
                await asyncio.sleep(0.01)
            assert rig.open_sessions == []
            assert all(relay.stage.kv_bytes() == 0 for node in rig.stages for relay in node)

    asyncio.run(main())


@pytest.mark.parametrize("private", [True, False])
def test_a_private_ring_sends_no_token(
    private: bool, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even for a repetition penalty, which must know the prompt. Without --private all of it is seen."""
    sent: list[tuple[Header, list[bytes]]] = []
    send = StreamChannel.send

    async def tapped(self: StreamChannel, header: Header, tensors: object = ()) -> None:
        sent.append((header, [bytes(t) for t in tensors]))  # type: ignore[attr-defined]
        await send(self, header, tensors)  # type: ignore[arg-type]

    monkeypatch.setattr(StreamChannel, "send", tapped)
    prompt, sampling = PROMPTS[2], Sampling(repetition_penalty=1.3)

    async def main() -> list[int]:
        async with asyncio.timeout(60), memory_ring(tiny("llama"), (1, 3), private=private) as rig:
            return await rig.tokens(Request(tuple(prompt), 8, sampling))

    tokens = asyncio.run(main())
    assert tokens == uncut(tiny("llama"), prompt, 8, 4, sampling) != uncut(tiny("llama"), prompt, 8, 4)
    bytes_sent = b"".join(part for _, parts in sent for part in parts)
    whole = torch.tensor(prompt, dtype=torch.int64).numpy().tobytes()
    opened = [header for header, _ in sent if isinstance(header, Open)]
    assert opened and (whole in bytes_sent) is not private
    assert any(header.tensors for header in opened) is not private
    assert any(isinstance(header, Token) for header, _ in sent) is not private
    hidden = [header for header, _ in sent if isinstance(header, Hidden)]
    assert hidden and all(spec.shape[2:] == (HIDDEN,) and spec.dtype == "float32" for h in hidden for spec in h.tensors)
    assert HIDDEN != VOCAB
