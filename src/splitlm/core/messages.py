"""Every message of the control plane: frozen, tagged, JSON, at most 8 KiB. Messages carry decisions, never tensors."""

from __future__ import annotations

import msgspec

from splitlm.core import training
from splitlm.core.cut import Cut
from splitlm.core.errors import ProtocolError, SplitlmError
from splitlm.core.message import Message as Message

MAX_MESSAGE_BYTES = 8 * 1024
"""Largest control message on the wire."""
MAX_TROUBLE = 1500
"""Characters of an error's text that travel; each is at most 4 bytes."""


class Join(Message, frozen=True):
    """Stage to head: I am here. A stage with a fixed place says which blocks it holds.

    Attributes:
        name: how the stage calls itself (``host:pid``).
        begin: first block of a fixed place, or None when the head may choose.
        end: one past its last block; −1: to the end of the model.
    """

    name: str
    begin: int | None = None
    end: int | None = None


class Assign(Message, frozen=True):
    """Head to stage: your place in the ring, and how to build it.

    Attributes:
        node: the stage's number; the head is 0.
        cut: which node holds which blocks.
        model: hub id, directory or well-known name; a stage may have been told its own.
        family: name of the model family, empty to detect it.
        loader: ``shard`` or ``hf``.
        dtype: element type of the weights, resolved.
        compute: engine.
        threads: intra-op threads, 0 for the stage's own choice.
        deadline_s: how long to wait for neighbours.
        pace_ms: least time per block, for simulated devices; 0 is off.
        ring: number of this ring, to be claimed on data links.
        config: hash of the model's config: a stage with another model leaves before it loads anything.
        barrier_s: how long a stage waits for the head's word in a barrier.
    """

    node: int
    cut: Cut
    model: str
    family: str
    loader: str
    dtype: str
    compute: str
    threads: int
    deadline_s: float
    pace_ms: float = 0.0
    ring: str = ""
    config: str = ""
    barrier_s: float = 5.0


class Loaded(Message, frozen=True):
    """Stage to head: my segments are built and my data listener is open.

    ``host`` empty means: the address from which you see me. ``compute`` is the engine that runs, ``note`` what the user
    is to know of it.
    """

    host: str
    port: int
    parameters: int
    resident_bytes: int
    move_port: int = 0
    compute: str = ""
    note: str = ""


class Connect(Message, frozen=True):
    """Head to stage: everyone is loaded; send to this node. ``host`` empty means: where you reached me."""

    host: str
    port: int
    move_port: int = 0


class Ready(Message, frozen=True):
    """Stage to head: linked to both neighbours, waiting for frames."""


class Trouble(Message, frozen=True):
    """Either way: I stop, and this is why. ``code`` is the exit code of the error's class."""

    code: int
    text: str


class Stop(Message, frozen=True):
    """Head to stage: the ring is done; leave."""

    reason: str = ""


class Side(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One side of one move, see ``telemetry.record.Migration``."""

    node: int
    peer: int
    role: str
    epoch: int
    blocks: list[int]
    kv_bytes: int
    kv_tokens: int
    kv_ms: float
    background_bytes: int
    commit_ms: float
    pause_ms: float | None = None
    weight_construct_ms: float | None = None
    weight_read_ms: float | None = None
    weight_pack_ms: float | None = None
    page_cache_warm: bool | None = None
    pack_ms: float | None = None
    release_ms: float | None = None


class Report(Message, frozen=True):
    """Stage to head, on leaving: what this stage held and did (bytes; milliseconds summed over its steps).

    ``moves`` are its newest ones, as many as fit a message.
    """

    peak_rss_bytes: int
    import_rss_bytes: int
    resident_bytes: int
    compute_ms: float
    wait_ms: float
    send_ms: float
    moves: list[Side] = msgspec.field(default_factory=list)


class Ping(Message, frozen=True):
    """Either way, when nothing else was said: I am alive."""


class Announce(Message, frozen=True):
    """Head to all: at a coming boundary this cut is to be proposed; build blocks and send KV while tokens flow."""

    cut: Cut


class Staged(Message, frozen=True):
    """Stage to head: what can be brought in the background for this epoch is here. A reason says that it failed."""

    epoch: int
    reason: str = ""


class Prepare(Message, frozen=True):
    """Head to all, first phase of a barrier: make ready for this, and say whether you can.

    Attributes:
        seq: number of the barrier; every barrier has a higher one.
        epoch: the one that would serve after COMMIT; today's when nothing moves.
        decision: ``noop``, ``forced-shift`` or ``auto``.
        cut: the one proposed; None when nothing moves.
    """

    seq: int
    epoch: int
    decision: str
    cut: Cut | None = None


class Prepared(Message, frozen=True):
    """Stage to head (the barrier's READY): all that the new cut needs is here; from now on only you decide.

    ``compute_ms`` is the node's median compute for one token in the window that ended; 0 where it computed none.
    """

    seq: int
    compute_ms: float = 0.0


class Nack(Message, frozen=True):
    """Stage to head, instead of Prepared: I cannot, and this is why."""

    seq: int
    reason: str


class Commit(Message, frozen=True):
    """Head to all, second phase: every stage is prepared; apply."""

    seq: int
    epoch: int


class Done(Message, frozen=True):
    """Stage to head: applied."""

    seq: int


class Abort(Message, frozen=True):
    """Head to all, instead of Commit: drop what you prepared; the old cut serves on."""

    seq: int
    reason: str


class Finish(Message, frozen=True):
    """Head to all, after every Done: donors may drop what they kept for this barrier."""

    seq: int


Any = (
    Join
    | Assign
    | Loaded
    | Connect
    | Ready
    | Trouble
    | Stop
    | Report
    | Ping
    | Announce
    | Staged
    | Prepare
    | Prepared
    | Nack
    | Commit
    | Done
    | Abort
    | Finish
    | training.Any
)
_DECODER = msgspec.json.Decoder(Any)
"""Made once: looking at all kinds of message takes longer than reading one."""


def trouble(error: SplitlmError) -> Trouble:
    """The message for an error of ours; a very long text is cut short, since saying why must not fail."""
    text = "".join(c if c.isprintable() else " " for c in str(error))
    return Trouble(error.exit_code, text if len(text) <= MAX_TROUBLE else text[: MAX_TROUBLE - 1] + "…")


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
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, SplitlmError) as error:
        raise ProtocolError(
            f"A control message could not be read: {error}",
            where=where,
            expected="a message of the same splitlm version",
        ) from error
