"""Control messages: small, tagged, strict."""

from __future__ import annotations

import json

import msgspec
import pytest

from splitlm.core import messages
from splitlm.core.cut import make_cut
from splitlm.core.errors import ProtocolError
from splitlm.core.messages import MAX_MESSAGE_BYTES, Message

ASSIGN = messages.Assign(
    node=1,
    cut=make_cut(30, (6, 11), private=True),
    model="smollm2-135m",
    family="llama",
    loader="shard",
    dtype="float32",
    compute="exact",
    threads=1,
    next_host="",
    next_port=4000,
    deadline_s=60.0,
    prefill_chunk=256,
)
ALL: list[Message] = [
    messages.Join(name="host:1", host="", port=1),
    ASSIGN,
    messages.Loading(phase="reading"),
    messages.Ready(parameters=1, resident_bytes=4),
    messages.Trouble(code=4, text="no such file"),
    messages.Stop(),
    messages.Report(peak_rss_bytes=2, import_rss_bytes=1, tokens=3, compute_ms=1.0, recv_wait_ms=2.0, send_ms=3.0),
    messages.Ping(),
]


def test_every_kind_of_message_is_tested_here_and_can_be_decoded() -> None:
    kinds = {kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, Message)} - {
        Message
    }
    assert kinds == {type(message) for message in ALL} == set(messages.Any.__args__)


@pytest.mark.parametrize("message", ALL, ids=lambda m: type(m).__name__)
def test_a_message_comes_back_as_itself(message: Message) -> None:
    data = messages.encode(message)
    assert json.loads(data)["kind"] == type(message).__name__.lower()
    assert messages.decode(data) == message
    assert messages.decode(memoryview(data)) == message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"kind": "other"}',
        b'{"port": 1}',
        b'{"kind": "join", "name": "a", "host": "b", "port": "1"}',
        b'{"kind": "join", "name": "a", "host": "b"}',
        b'{"kind": "loading", "phase": "sleeping"}',
    ],
)
def test_what_is_no_message_is_refused_and_the_peer_named(data: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"^host:9: .*could not be read"):
        messages.decode(data, where="host:9")


def test_a_wrong_field_is_named() -> None:
    with pytest.raises(ProtocolError, match=r"\$\.port"):
        messages.decode(b'{"kind": "join", "name": "a", "host": "b", "port": "1"}')


def test_a_cut_that_no_model_can_have_is_the_peers_fault() -> None:
    data = messages.encode(ASSIGN).replace(b'"blocks":30', b'"blocks":31')
    with pytest.raises(ProtocolError, match=r"^host:9: .*all 31 blocks"):
        messages.decode(data, where="host:9")


def test_the_limit_holds_both_ways() -> None:
    rest = len(messages.encode(messages.Trouble(code=1, text="")))
    edge = messages.Trouble(code=1, text="x" * (MAX_MESSAGE_BYTES - rest))
    assert len(messages.encode(edge)) == MAX_MESSAGE_BYTES
    assert messages.decode(messages.encode(edge)) == edge
    over = messages.Trouble(code=1, text="x" * (MAX_MESSAGE_BYTES - rest + 1))
    with pytest.raises(ProtocolError, match="8193 bytes"):
        messages.encode(over)
    with pytest.raises(ProtocolError, match="8193 bytes"):
        messages.decode(msgspec.json.encode(over))
