"""Every message of the control plane: frozen, tagged, JSON, at most 8 KiB. Messages carry decisions, never tensors."""

from __future__ import annotations

from typing import Literal

import msgspec

from splitlm.core.cut import Cut
from splitlm.core.errors import ProtocolError, SplitlmError

MAX_MESSAGE_BYTES = 8 * 1024
"""Largest control message on the wire."""


class Message(msgspec.Struct, frozen=True, tag_field="kind", tag=lambda name: name.lower()):
    """Base of all control messages."""


class Join(Message, frozen=True):
    """Stage to head: I am here. A stage with a fixed place says which blocks it holds.

    Attributes:
        name: how the stage calls itself (``host:pid``).
        host: where its data listener can be reached; empty: the address it dialled from.
        port: its data listener's port.
        begin: first block of a fixed place, or None when the head may choose.
        end: one past its last block.
        send: the address it will send to (``host:port``), fixed places only.
    """

    name: str
    host: str
    port: int
    begin: int | None = None
    end: int | None = None
    send: str = ""


class Assign(Message, frozen=True):
    """Head to stage: your place in the ring, and how to build it.

    ``next_host`` empty means: the address at which you reached me.
    """

    node: int
    cut: Cut
    model: str
    family: str
    loader: str
    dtype: str
    compute: str
    threads: int
    next_host: str
    next_port: int
    deadline_s: float
    prefill_chunk: int
    trace_dir: str = ""
    block_delay_ms: float = 0.0


class Loading(Message, frozen=True):
    """Stage to head: what I am doing now, for the progress line."""

    phase: Literal["reading", "connecting"]


class Ready(Message, frozen=True):
    """Stage to head: built, linked to both neighbours, waiting for frames."""

    parameters: int
    resident_bytes: int


class Trouble(Message, frozen=True):
    """Either way: I stop, and this is why. ``code`` is the exit code of the error's class."""

    code: int
    text: str


class Stop(Message, frozen=True):
    """Head to stage: the ring is done; leave."""

    reason: str = ""


class Report(Message, frozen=True):
    """Stage to head, on leaving: what this stage held and did."""

    peak_rss_bytes: int
    import_rss_bytes: int
    tokens: int
    compute_ms: float
    recv_wait_ms: float
    send_ms: float


class Ping(Message, frozen=True):
    """Either way, when nothing else was said: I am alive."""


Any = Join | Assign | Loading | Ready | Trouble | Stop | Report | Ping


def encode(message: Message) -> bytes:
    """One message as JSON.

    Raises:
        ProtocolError: it is larger than ``MAX_MESSAGE_BYTES``.
    """
    data = msgspec.json.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"A {type(message).__name__} message of {len(data)} bytes was to be sent",
            expected=f"at most {MAX_MESSAGE_BYTES} bytes",
        )
    return data


def decode(data: bytes | bytearray | memoryview, where: str = "") -> Any:
    """One message from JSON, strictly typed.

    Raises:
        ProtocolError: too large, of an unknown kind, or with a field of the wrong type; the field is named.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"A control message of {len(data)} bytes came", where=where, expected=f"at most {MAX_MESSAGE_BYTES} bytes"
        )
    try:
        return msgspec.json.decode(data, type=Any)
    except (msgspec.MsgspecError, UnicodeDecodeError, SplitlmError) as error:
        raise ProtocolError(
            f"A control message could not be read: {error}",
            where=where,
            expected="a message of the same splitlm version",
        ) from error
