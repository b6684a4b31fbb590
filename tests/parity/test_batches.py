"""Sessions that share steps give, bit for bit, what each gives alone in the same ring, wherever it is cut."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from splitlm.core.errors import ModelError
from splitlm.core.shifts import Shift
from splitlm.infer.schedule import share
from splitlm.local import Generation, Ring
from splitlm.model.compute.products import KINDS
from splitlm.telemetry.record import Step
from splitlm.telemetry.sinks import read_trace
from tests.model.made import edit_tensors
from tests.parity.chain import long_prompt
from tests.tiny import build

pytestmark = pytest.mark.skipif(bool(KINDS["fast"].missing()), reason="this machine has no float16 products")
LENGTHS = (3, 21, 11, 34, 1, 8, 40, 16)
NEWS = (40, 12, 33, 25, 60, 9, 28, 48)
PROMPTS = [long_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
RINGS: dict[str, dict[str, Any]] = {
    "uncut": {"stages": 1},
    "two": {"cuts": (3,)},
    "private": {"cuts": (2,), "private": True, "tail_blocks": 1},
    "three": {"cuts": (2, 4)},
    "private three": {"cuts": (0, 3), "private": True},
}


class Party:
    """Sessions of one ring that begin one after the other: each when the one before it has two pieces of text."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    def together(self, which: Sequence[int], *, staggered: bool = True, **options: Any) -> list[Generation]:
        """Of these prompts, all under way at once."""
        with ThreadPoolExecutor(len(which)) as pool:
            results: list[Future[Generation]] = []
            for i in which:
                begun, pieces = threading.Event(), []

                def told(text: str, begun: threading.Event = begun, pieces: list[str] = pieces) -> None:
                    pieces.append(text)
                    if len(pieces) == 2:
                        begun.set()

                results.append(pool.submit(self.alone, i, on_text=told, **options))
                results[-1].add_done_callback(lambda _, begun=begun: begun.set())
                if staggered:
                    assert begun.wait(30)
            return [result.result() for result in results]

    def alone(self, i: int, **options: Any) -> Generation:
        """One of the prompts."""
        given = {"max_new_tokens": NEWS[i], "ignore_eos": True, "logits": True, **options}
        return self._ring.generate(PROMPTS[i], **given)


def same(ours: Generation, theirs: Generation) -> bool:
    pairs = zip(ours.logits, theirs.logits, strict=True)
    return ours.tokens == theirs.tokens and all(torch.equal(a, b) for a, b in pairs)


def steps_of(trace: Path) -> list[Step]:
    records = [record for path in sorted(trace.glob("trace-node*.jsonl")) for record in read_trace(path)]
    return [record for record in records if isinstance(record, Step)]


@dataclass
class Ran:
    alone: list[Generation]
    together: dict[int, list[Generation]]
    rush: list[Generation]
    left: list[Generation]
    stopped: list[Generation]
    steps: list[Step]
    segments: int


@pytest.fixture(scope="module", params=RINGS)
def ran(request: pytest.FixtureRequest, tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Ran:
    trace = tmp_path_factory.mktemp("trace")
    settings = {"compute": "fast", "threads": 1, "prefill_chunk": 16, "window": 0, **RINGS[request.param]}
    with Ring(str(tiny("llama")), trace_dir=trace, **settings) as ring:
        party = Party(ring)
        alone = [party.alone(i) for i in range(8)]  # sessions 1 to 8
        together = {n: party.together(range(n)) for n in range(2, 9)}
        rush = party.together(range(8), staggered=False)
        with ThreadPoolExecutor(7) as pool:
            others = [pool.submit(party.alone, i) for i in range(1, 8)]
            for _, _ in zip(range(5), ring.stream(PROMPTS[0], max_new_tokens=100, ignore_eos=True), strict=False):
                pass  # and leave it
            left = [other.result() for other in others]
        stops = [made.text[6:8] for made in alone[:4]]
        with ThreadPoolExecutor(8) as pool:
            stopped = list(pool.map(lambda i: party.alone(i, stop=stops[i] if i < 4 else ()), range(8)))
        segments = len(ring.cut.segments)
    return Ran(alone, together, rush, left, stopped, steps_of(trace), segments)


def test_any_number_of_sessions_gives_each_what_it_gets_alone(ran: Ran) -> None:
    """Of lengths and ends of their own, so that the others begin and end while each goes on."""
    assert len({tuple(made.tokens[:8]) for made in ran.alone}) == 8
    for made in [*ran.together.values(), ran.rush]:
        assert [len(one.tokens) for one in made] == list(NEWS[: len(made)])
        for ours, theirs in zip(made, ran.alone, strict=False):
            assert same(ours, theirs)


def test_a_session_that_is_left_in_the_middle_disturbs_nobody(ran: Ran) -> None:
    assert all(same(ours, theirs) for ours, theirs in zip(ran.left, ran.alone[1:], strict=True))


def test_a_stop_string_ends_its_session_and_no_other(ran: Ran) -> None:
    for i, (made, whole) in enumerate(zip(ran.stopped, ran.alone, strict=True)):
        if i >= 4:
            assert same(made, whole)
            continue
        assert made.finish == "stop" and len(made.tokens) < NEWS[i]
        assert made.tokens == whole.tokens[: len(made.tokens)]
        assert all(torch.equal(a, b) for a, b in zip(made.logits, whole.logits, strict=False))


def test_steps_are_shared_on_every_segment_and_only_where_there_is_company(ran: Ran) -> None:
    def segment(step: Step) -> int:
        return step.node if step.segment is None else step.segment

    for number in range(ran.segments):
        own = [step for step in ran.steps if segment(step) == number]
        assert {step.batch for step in own if step.session <= 8} == {1}, "these were alone"
        assert {step.batch for step in own if step.prefill} == {1}
        assert max(step.batch for step in own) > 1, f"segment {number} never shared a step"
    first = [step.batch for step in ran.steps if segment(step) == 0]
    assert max(first) <= share(8, ran.segments, 32)


def test_records_of_a_shared_step_agree(ran: Ran) -> None:
    """As many records as sessions shared it, with one time; no session twice."""
    shared: dict[tuple[int, int, int], list[Step]] = {}
    for step in ran.steps:
        if step.batch > 1:
            shared.setdefault((step.node, step.segment or 0, step.start_ns), []).append(step)
    for steps in shared.values():
        assert len(steps) == steps[0].batch == len({step.session for step in steps})
        assert len({(step.end_ns, step.batch, step.compute_ms) for step in steps}) == 1


@pytest.mark.parametrize("cut", [{"stages": 1}, {"cuts": (2,), "private": True}])
def test_exact_never_shares_a_step(cut: dict[str, Any], tiny: Callable[[str], Path], tmp_path: Path) -> None:
    with Ring(str(tiny("llama")), trace_dir=tmp_path, window=0, threads=1, **cut) as ring:
        made = Party(ring).together(range(6), staggered=False)
        assert all(same(ours, Party(ring).alone(i)) for i, ours in enumerate(made))
    steps = steps_of(tmp_path)
    assert len(steps) > 6 * 9 and {step.batch for step in steps} == {1}


@pytest.mark.parametrize("ring", ["uncut", "three", "private"])
def test_a_session_whose_logits_are_not_finite_ends_alone_among_seven_others(ring: str, tmp_path: Path) -> None:
    """The embedding of a token that only this session makes, and not as its first, holds no numbers."""
    folder = build("llama-untied", tmp_path / "model")
    settings = {"compute": "fast", "threads": 1, "window": 0, "prefill_chunk": 16}
    with Ring(str(folder), stages=1, **settings) as whole:
        alone = [Party(whole).alone(i) for i in range(8)]
    own = {
        i: [t for t in made.tokens[3:-1] if t not in made.tokens[:3] + PROMPTS[i] and t not in others]
        for i, made in enumerate(alone)
        for others in [{t for j in range(8) if j != i for t in PROMPTS[j] + alone[j].tokens}]
    }
    bad, token = next((i, tokens[0]) for i, tokens in own.items() if tokens)

    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors["model.embed_tokens.weight"][token] = torch.nan
        return tensors

    edit_tensors(folder, spoil)
    with (
        Ring(str(folder), trace_dir=tmp_path / "trace", **settings, **RINGS[ring]) as spoiled,
        ThreadPoolExecutor(8) as pool,
    ):
        party = Party(spoiled)
        results = [pool.submit(party.alone, i) for i in range(8)]
        with pytest.raises(ModelError, match="hold a nan"):
            results[bad].result()
        for i in set(range(8)) - {bad}:
            assert same(results[i].result(), alone[i])
        good = min(set(range(8)) - {bad})
        assert same(party.alone(good), alone[good])
    assert max(step.batch for step in steps_of(tmp_path / "trace")) > 1


def test_moves_of_blocks_change_no_bit_of_four_sessions(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    settings = {"compute": "fast", "threads": 1, "cuts": (2, 4), "prefill_chunk": 16}
    with Ring(str(tiny("llama")), window=0, **settings) as still:
        alone = [Party(still).alone(i, max_new_tokens=60) for i in range(4)]
    shifts = [Shift(10, 1, -1), Shift(30, 2, -1), Shift(50, 1, 1)]
    with Ring(str(tiny("llama")), window=10, shifts=shifts, trace_dir=tmp_path, **settings) as moving:
        made = Party(moving).together(range(4), max_new_tokens=60)
        boundaries = moving.boundaries
        epoch = moving.cut.epoch
    assert epoch == 3 and sum(bool(b.moves) for b in boundaries) == 3
    assert not any(b.outcome.aborted for b in boundaries)
    assert all(same(ours, theirs) for ours, theirs in zip(made, alone, strict=True))
    steps = steps_of(tmp_path)
    assert all(max(s.batch for s in steps if s.node == node and s.epoch == 3) >= 1 for node in range(3))
    assert max(step.batch for step in steps if step.epoch > 0) > 1
