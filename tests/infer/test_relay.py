"""What a stage makes of each frame, and every frame that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from splitlm.core.cut import make_cut
from splitlm.core.errors import ProtocolError
from splitlm.core.sampling import Sampling
from splitlm.infer.relay import Relay, Step
from splitlm.model import payload
from splitlm.model.load import ModelFiles
from splitlm.wire.frame import Close, Frame, Header, Hidden, Open, Refused, Said, Token, Welcome
from splitlm.wire.frame import decode_header as decode
from tests.infer.rig import relays
from tests.tiny import CONTEXT, HIDDEN, VOCAB

EPOCH = 3
ROWS = torch.linspace(-1, 1, 2 * HIDDEN).reshape(1, 2, HIDDEN)


@pytest.fixture
def files(tiny: Callable[[str], Path]) -> ModelFiles:
    return ModelFiles(tiny("llama"))


@pytest.fixture
def middle(files: ModelFiles) -> Relay:
    return relays(files, msgspec.structs.replace(make_cut(5, (2, 4)), epoch=EPOCH), 1)[0]


@pytest.fixture
def last(files: ModelFiles) -> Relay:
    return relays(files, msgspec.structs.replace(make_cut(5, (2, 4)), epoch=EPOCH), 2)[0]


def frame(header: Header, *tensors: torch.Tensor) -> Frame:
    dumped = [payload.dump(tensor) for tensor in tensors]
    specs = tuple(spec for spec, _ in dumped)
    return Frame(msgspec.structs.replace(header, tensors=specs), [view for _, view in dumped])  # type: ignore[arg-type]


def opened(session: int = 1, context: int = CONTEXT, **options: object) -> Open:
    return Open(session=session, context=context, sampling=Sampling(), **options)  # type: ignore[arg-type]


def hidden(session: int = 1, epoch: int = EPOCH, position: int = 0, sample: bool = False) -> Hidden:
    return Hidden(session=session, epoch=epoch, position=position, sample=sample)


def same(a: Step, b: Step) -> bool:
    return a.header == b.header and [bytes(t) for t in a.tensors] == [bytes(t) for t in b.tensors]


def test_a_middle_stage_passes_sessions_on_and_transforms_rows(middle: Relay) -> None:
    first = middle.handle(frame(opened(), torch.tensor([5, 6])))
    assert isinstance(first.header, Open)
    assert bytes(first.tensors[0]) == bytes(payload.dump(torch.tensor([5, 6]))[1])
    step = middle.handle(frame(hidden(sample=True), ROWS))
    assert isinstance(step.header, Hidden)
    assert (step.header.position, step.header.sample, step.header.epoch) == (0, True, EPOCH)
    assert (step.rows, step.prefill, step.position) == (2, True, 0)
    assert step.kv_bytes > 0
    assert step.header.tensors[0].shape == (1, 2, HIDDEN)
    later = middle.handle(frame(hidden(position=2, sample=True), ROWS[:, :1]))
    assert (later.rows, later.prefill) == (1, False)
    closed = middle.handle(Frame(Close(session=1)))
    assert closed.header == Close(session=1)
    assert closed.rows == 0
    assert middle.stage.sessions == []


def test_the_last_stage_makes_a_token_only_when_asked_and_logits_only_when_asked(last: Relay) -> None:
    last.handle(Frame(opened(1)))
    last.handle(Frame(opened(2, logits=True)))
    assert last.handle(frame(hidden(1), ROWS)).header is None
    token = last.handle(frame(hidden(1, position=2, sample=True), ROWS))
    assert isinstance(token.header, Token)
    assert (token.header.position, len(token.tensors)) == (4, 0)
    other = last.handle(frame(hidden(2, sample=True), ROWS))
    assert isinstance(other.header, Token)
    logits = payload.load(other.header.tensors[0], memoryview(other.tensors[0]))
    assert logits.shape == (VOCAB,)
    assert int(logits.argmax()) == other.header.token
    assert last.handle(Frame(Close(session=1))).header is None
    assert last.stage.sessions == [2]


def test_sessions_do_not_see_each_other(middle: Relay) -> None:
    for number in (1, 2):
        middle.handle(Frame(opened(number)))
    middle.handle(frame(hidden(1), ROWS))
    alone = middle.handle(frame(hidden(1, position=2), ROWS))
    middle.handle(frame(hidden(2), ROWS))
    again = middle.handle(frame(hidden(2, position=2), ROWS))
    assert [bytes(t) for t in alone.tensors] == [bytes(t) for t in again.tensors]


def test_closing_what_is_not_open_is_no_error_and_travels_on(middle: Relay) -> None:
    assert middle.handle(Frame(Close(session=9))).header == Close(session=9)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (frame(hidden(epoch=EPOCH - 1), ROWS), f"epoch {EPOCH - 1} came.*Expected epoch {EPOCH}"),
        (frame(hidden(epoch=EPOCH + 1), ROWS), f"Expected epoch {EPOCH}"),
        (frame(hidden(session=2), ROWS), "Session 2 is not open"),
        (frame(hidden(position=1), ROWS), "position 1.*Expected position 0"),
        (frame(hidden(position=-1), ROWS), "position -1"),
        (frame(hidden(), torch.zeros(1, 9, HIDDEN)), "reaches position 9.*at most 8"),
        (frame(hidden(), ROWS[0, :, :4]), "Inputs of shape"),
        (frame(hidden(), ROWS[..., :-1]), "Inputs of shape"),
        (frame(hidden(), ROWS.expand(2, 2, HIDDEN)), "Inputs of shape"),
        (frame(hidden(), ROWS[:, :0]), "Inputs of shape"),
        (frame(hidden(), ROWS.to(torch.float16)), "float16.*float32"),
        (frame(hidden(), torch.ones(1, 2, dtype=torch.int64)), "int64"),
        (frame(hidden(), torch.tensor(1.0)), "Inputs of shape"),
        (frame(hidden()), "0 tensors"),
        (frame(hidden(), ROWS, ROWS), "2 tensors"),
        (frame(opened()), "opened twice"),
        (frame(opened(5), torch.tensor([1.0])), "prompt of shape"),
        (frame(opened(5), torch.tensor([[1]])), "prompt of shape"),
        (frame(opened(5), torch.tensor([VOCAB])), "out of range"),
        (frame(opened(5), torch.tensor([-1])), "out of range"),
        (frame(opened(5), torch.tensor([1]), torch.tensor([1])), "2 tensors"),
        (Frame(Token(session=1, epoch=EPOCH, position=0, token=1)), "A Token frame came"),
        (Frame(Said(message=b"{}")), "A Said frame came"),
        (Frame(Welcome(proof=b"", claims=b"")), "A Welcome frame came"),
        (Frame(Refused(reason="no")), "A Refused frame came"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("place", ["middle", "last"])
def test_a_frame_that_has_no_place_here_is_refused_and_changes_nothing(
    bad: Frame, says: str, place: str, middle: Relay, last: Relay
) -> None:
    relay = {"middle": middle, "last": last}[place]
    relay.handle(Frame(opened(context=8)))
    tensors = bad.tensors
    with pytest.raises(ProtocolError, match=says):
        relay.handle(bad)
    assert bad.tensors == tensors
    assert relay.stage.sessions == [1]
    # The session goes on as if nothing had come.
    step = relay.handle(frame(hidden(sample=True), ROWS))
    assert step.rows == 2


def test_sampling_that_makes_no_sense_is_refused_where_frames_are_read() -> None:
    good = Open(session=1, context=8, sampling=Sampling(temperature=0.5))
    data = msgspec.msgpack.encode(good)
    assert decode(data) == good
    bad = data.replace(msgspec.msgpack.encode(0.5), msgspec.msgpack.encode(-0.5))
    assert bad != data
    with pytest.raises(ProtocolError, match=r"temperature is -0\.5"):
        decode(bad)
