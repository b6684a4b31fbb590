"""Control messages: small, tagged, strict."""

from __future__ import annotations

import json
from typing import get_args, get_type_hints

import msgspec
import pytest

from splitlm.core import messages, training
from splitlm.core.cut import Cut, make_cut
from splitlm.core.errors import ProtocolError
from splitlm.core.messages import MAX_MESSAGE_BYTES, Message

CUT = make_cut(30, (6, 11), private=True)
SIDE = messages.Side(
    node=1,
    peer=2,
    role="donor",
    epoch=3,
    blocks=[4],
    kv_bytes=5,
    kv_tokens=6,
    kv_ms=7.5,
    background_bytes=8,
    commit_ms=9,
)
KINDS = [
    kind
    for room in (messages, training)
    for kind in vars(room).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind not in (Message, training.TrainingMessage)
]


def example(kind: type[Message]) -> Message:
    """A message of this kind with no field at its default."""
    values: dict[object, object] = {
        int: 7,
        float: 1.5,
        str: "x",
        bool: True,
        Cut: CUT,
        list[messages.Side]: [SIDE],
        dict[str, object]: {"a": 1},
        dict[int, float]: {1: 2.5},
        dict[str, float]: {"a": 2.5},
        dict[str, list[int]]: {"a": [1, 2]},
        list[training.SavedFile]: [training.SavedFile("name", 1, "digest")],
        tuple[str, int]: ("host", 1),
        tuple[training.Role, int]: ("worker", 1),
        list[tuple[training.Role, int]]: [("worker", 1), ("owner", 0)],
        list[int]: [1, 2],
        list[training.Peer]: [training.Peer(1, "host", 2, 3, 1.5)],
        list[training.Share]: [training.Share(0, [1], 2)],
    }
    hints = get_type_hints(kind)
    given = {}
    for field in kind.__struct_fields__:
        options = (hints[field], *get_args(hints[field]))
        given[field] = next((values[option] for option in options if option in values), options[-1])
    return kind(**given)


ALL = [example(kind) for kind in KINDS]
ASSIGN = example(messages.Assign)


def test_every_kind_of_message_can_be_decoded() -> None:
    assert len(KINDS) >= 8
    assert set(KINDS) == set(get_args(messages.Any))


@pytest.mark.parametrize("message", ALL, ids=lambda m: type(m).__name__)
def test_a_message_comes_back_as_itself(message: Message) -> None:
    data = messages.encode(message)
    name = type(message).__name__.lower()
    assert json.loads(data)["kind"] in (name, f"train{name}")
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
        b'{"kind": "join", "name": "a", "begin": "1"}',
        b'{"kind": "join"}',
        b'{"kind": "trouble", "code": 1.5, "text": ""}',
    ],
)
def test_what_is_no_message_is_refused_and_the_peer_named(data: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"^host:9: .*could not be read"):
        messages.decode(data, where="host:9")


def test_a_wrong_field_is_named() -> None:
    with pytest.raises(ProtocolError, match=r"\$\.begin"):
        messages.decode(b'{"kind": "join", "name": "a", "begin": "1"}')


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


def test_deep_nesting_is_a_protocol_error_not_a_crash_of_the_reader() -> None:
    with pytest.raises(ProtocolError, match="could not be read"):
        messages.decode(b'{"kind":"stop","x":' + b"[" * 4000 + b"]" * 4000 + b"}")
