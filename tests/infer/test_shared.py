"""Decode steps of several sessions in one forward: which frames may share it, and what each session has of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from splitlm.core.cut import make_cut
from splitlm.core.errors import ProtocolError
from splitlm.core.sampling import Sampling
from splitlm.infer.relay import Relay
from splitlm.model.compute.products import KINDS
from splitlm.model.load import ModelFiles
from splitlm.model.sampling import Sampler
from splitlm.model.stage import Stage
from splitlm.model.stage import Step as Rows
from splitlm.wire.frame import Close, Failed, Fence, Frame, Header, Hidden, Open, Token
from tests.infer.rig import relays
from tests.infer.test_relay import EPOCH, frame, hidden, opened
from tests.tiny import HIDDEN

pytestmark = pytest.mark.skipif(bool(KINDS["fast"].missing()), reason="this machine has no float16 products")
SESSIONS = (1, 2, 3)


def rows(session: int, count: int = 1, seed: int = 0) -> torch.Tensor:
    made = torch.randn(1, count, HIDDEN, generator=torch.Generator().manual_seed(100 * session + seed))
    return made.clamp(-2, 2)


def started(tiny: Callable[[str], Path], node: int, compute: str = "fast", sampling: Sampling | None = None) -> Relay:
    """Session s has a prompt of 2s + 1 rows, and has decoded nothing."""
    files = ModelFiles(tiny("llama"))
    cut = msgspec.structs.replace(make_cut(files.blocks, (2, 4)), epoch=EPOCH)
    relay = relays(files, cut, node, compute)[0]
    for session in SESSIONS:
        relay.handle(Frame(msgspec.structs.replace(opened(session), sampling=sampling or Sampling())))
        relay.handle(frame(hidden(session, sample=True), rows(session, 2 * session + 1)))
    return relay


def token(session: int, lap: int = 0) -> Frame:
    """The next decode step of a session."""
    return frame(hidden(session, position=2 * session + 1 + lap, sample=True), rows(session, seed=lap + 1))


def bytes_of(tensors: Sequence[object]) -> list[bytes]:
    return [bytes(t) for t in tensors]  # type: ignore[call-overload]


@pytest.mark.parametrize("node", [1, 2])
def test_a_shared_step_gives_each_session_what_it_gets_alone(tiny: Callable[[str], Path], node: int) -> None:
    alone, together = started(tiny, node), started(tiny, node)
    for lap in range(3):
        single = [alone.handle(token(session, lap)) for session in SESSIONS]
        order = SESSIONS[lap:] + SESSIONS[:lap]
        frames = [token(session, lap) for session in order]
        assert all(together.joins(frame, frames[:i]) for i, frame in enumerate(frames))
        shared = {step.session: step for step in together.handle_many(frames)}
        assert list(shared) == list(order)
        assert len({(step.start_ns, step.end_ns) for step in shared.values()}) == 1
        for one in single:
            other = shared[one.session]
            assert (other.header, bytes_of(other.tensors)) == (one.header, bytes_of(one.tensors))
            assert (other.position, other.rows, other.prefill) == (one.position, 1, False)
            assert other.kv_bytes == one.kv_bytes > 0
            assert (other.batch, one.batch) == (3, 1)
            assert isinstance(one.header, Token if node == 2 else Hidden)
            assert other.end_ns > other.start_ns


@pytest.mark.parametrize(
    "bad",
    [
        hidden(1, epoch=EPOCH - 1, position=3, sample=True),
        hidden(1, position=2, sample=True),
        hidden(1, position=4, sample=True),
        hidden(9, position=3, sample=True),
        Close(session=1),
        Fence(number=1),
        Failed(session=1, code=1, reason="no"),
        Open(session=9, context=8, sampling=Sampling()),
    ],
    ids=str,
)
def test_what_is_no_decode_step_in_its_place_joins_nothing(tiny: Callable[[str], Path], bad: Header) -> None:
    relay = started(tiny, 1)
    given = frame(bad, rows(1)) if isinstance(bad, Hidden) else Frame(bad)
    assert relay.joins(token(1))
    assert not relay.joins(given)
    assert not relay.joins(given, [token(2)])


def test_neither_prompts_nor_rows_of_another_shape_join(tiny: Callable[[str], Path]) -> None:
    relay = started(tiny, 1)
    relay.handle(Frame(opened(4)))
    assert not relay.joins(frame(hidden(4, sample=True), rows(4)))  # a prompt of one row
    relay.handle(frame(hidden(4), rows(4)))
    assert not relay.joins(frame(hidden(4, position=1, sample=True), rows(4)))  # its second chunk
    relay.handle(frame(hidden(4, position=1, sample=True), rows(4)))
    place = hidden(4, position=2, sample=True)
    assert relay.joins(frame(place, rows(4)))
    for wrong in (rows(4, 2), rows(4)[..., :-1], rows(4).half(), rows(4)[0], torch.zeros(1, 1, dtype=torch.int64)):
        assert not relay.joins(frame(place, wrong))
    assert not relay.joins(frame(place)) and not relay.joins(frame(place, rows(4), rows(4)))


def test_a_session_joins_once_at_most_as_many_as_the_engine_takes_and_to_its_context_s_end(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = started(tiny, 1)
    assert relay.joins(token(2), [token(1)])
    assert not relay.joins(token(1), [token(1)]) and not relay.joins(token(1), [token(2), token(1)])
    monkeypatch.setattr(relay.stage.engine, "width", 2)
    assert relay.joins(token(2), [token(1)]) and not relay.joins(token(3), [token(1), token(2)])
    relay.handle(Frame(opened(4, context=2)))
    relay.handle(frame(hidden(4, sample=True), rows(4)))
    assert relay.joins(frame(hidden(4, position=1, sample=True), rows(4)))
    relay.handle(frame(hidden(4, position=1, sample=True), rows(4)))
    assert not relay.joins(frame(hidden(4, position=2, sample=True), rows(4)))


def test_a_session_that_decodes_alone_waits_for_nobody(tiny: Callable[[str], Path]) -> None:
    """Not even for a look whether another frame is there."""
    relay = started(tiny, 1)
    relay.handle(Frame(Close(session=3)))
    assert relay.joins(token(1))
    relay.handle(Frame(Close(session=2)))
    assert not relay.joins(token(1))


def test_with_exact_nothing_joins(tiny: Callable[[str], Path]) -> None:
    relay = started(tiny, 1, "exact")
    assert relay.width == 1
    assert not relay.joins(token(2), [token(1)])
    with pytest.raises(ProtocolError, match="A Close frame came"):
        started(tiny, 1).advance_many([token(1), Frame(Close(session=2))])


def test_logits_that_are_not_finite_end_their_session_alone(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    relay, alone = started(tiny, 2), started(tiny, 2)
    choose = Sampler.next

    def poisoned(self: Sampler, logits: torch.Tensor, position: int | None = None) -> int:
        return choose(self, logits * torch.nan if position == 6 else logits, position)

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "next", poisoned)
        one, two, three = relay.handle_many([token(session) for session in SESSIONS])
    assert isinstance(two.header, Failed) and two.header.session == 2 and two.rows == 0
    assert "Session 2: the logits for position 6 hold a nan" in two.header.reason
    assert "in a step of" not in two.header.reason
    assert one.header == alone.handle(token(1)).header and three.header == alone.handle(token(3)).header
    assert relay.stage.sessions == [1, 3]
    assert not relay.joins(token(2, 1))
    assert relay.handle(token(2, 1)).header is None, "sent before the head heard of it"
    later = relay.handle_many([token(3, 1), token(1, 1)])
    assert [step.header for step in later] == [alone.handle(token(3, 1)).header, alone.handle(token(1, 1)).header]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes")])
def test_memory_that_runs_out_in_a_shared_step_ends_its_sessions_and_says_so(
    tiny: Callable[[str], Path], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay, alone = started(tiny, 2), started(tiny, 2)
    forward = Stage.forward_many

    def failing(self: Stage, steps: Sequence[Rows]) -> list[torch.Tensor | None]:
        forward(self, steps)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Stage, "forward_many", failing)
        steps = relay.handle_many([token(1), token(3)])
    for step, session in zip(steps, (1, 3), strict=True):
        assert isinstance(step.header, Failed) and step.header.session == session and step.rows == 0
        where = f"Session {session}, position {2 * session + 1}, in a step of 2 sessions, which ends them all"
        assert where in step.header.reason and "memory ran out" in step.header.reason
    assert relay.stage.sessions == [2]
    assert relay.handle(token(2)).header == alone.handle(token(2)).header


@pytest.mark.parametrize("error", [RuntimeError("The size of tensor a must match"), ProtocolError("Out of place")])
def test_a_fault_that_is_no_session_s_own_is_raised(
    tiny: Callable[[str], Path], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = started(tiny, 1)

    def failing(self: Stage, steps: Sequence[Rows]) -> list[torch.Tensor | None]:
        raise error

    monkeypatch.setattr(Stage, "forward_many", failing)
    with pytest.raises(type(error)) as caught:
        relay.handle_many([token(1), token(2)])
    assert caught.value is error
    assert relay.stage.sessions == [1, 2, 3]
