"""States on their way: a party's parameters or gradients, in pieces, checked at the end.

A tensor larger than one frame is cut into pieces; nothing is taken for whole before its digest is right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from splitlm.core.errors import ProtocolError
from splitlm.model import payload
from splitlm.wire.channel import Channel
from splitlm.wire.frame import Piece, Spec, Whole

What = Literal["update", "model", "gradient"]
PIECE_BYTES = 4 * 1024 * 1024
MAX_STATE_BYTES = 1 << 40
MAX_TENSORS = 100_000


@dataclass(frozen=True, eq=False)
class State:
    """What was sent.

    Attributes:
        what: which state.
        round: of the run.
        window: of the round, for gradients.
        samples: that it was made from.
        tensors: by name, in memory of their own.
    """

    what: What
    round: int
    window: int
    samples: int
    tensors: dict[str, torch.Tensor]


async def send_state(channel: Channel, state: State) -> None:
    """Send one state.

    Raises:
        PeerLostError: the peer is gone.
    """
    digest = hashlib.sha256()
    for name in sorted(state.tensors):
        spec, data = payload.dump(state.tensors[name].cpu())
        digest.update(name.encode() + b"\0")
        for offset in range(0, max(data.nbytes, 1), PIECE_BYTES):
            part = data[offset : offset + PIECE_BYTES]
            digest.update(part)
            header = Piece(
                what=state.what,
                round=state.round,
                window=state.window,
                name=name,
                spec=spec,
                offset=offset,
                tensors=(Spec("uint8", (part.nbytes,)),),
            )
            await channel.send(header, (part,))
    end = Whole(
        what=state.what,
        round=state.round,
        window=state.window,
        samples=state.samples,
        count=len(state.tensors),
        digest=digest.digest(),
    )
    await channel.send(end)


async def receive_state(channel: Channel, expected: Mapping[str, torch.Tensor] | None = None) -> State:
    """The next state.

    Args:
        expected: tensors of the names, shapes and element types that must come; None takes any.

    Raises:
        PeerLostError: the peer is gone.
        ProtocolError: pieces that do not fit together, or are not what was expected.
    """
    digest, taking = hashlib.sha256(), _Taking(channel.peer, expected)
    while True:
        frame = await channel.receive()
        try:
            match frame.header:
                case Piece() as piece if len(frame.tensors) == 1:
                    if piece.offset == 0:
                        digest.update(piece.name.encode() + b"\0")
                    digest.update(frame.tensors[0])
                    taking.take(piece, frame.tensors[0])
                case Whole() as whole:
                    taking.finish(whole, digest.digest())
                    return State(whole.what, whole.round, whole.window, whole.samples, taking.tensors)
                case other:
                    raise taking.wrong(f"A {type(other).__name__} frame came", "pieces of a state")
        finally:
            frame.release()


class _Taking:
    """Puts pieces together."""

    def __init__(self, where: str, expected: Mapping[str, torch.Tensor] | None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._where, self._expected = where, expected
        self._name, self._filled, self._total = "", 0, 0
        self._memory = memoryview(b"")

    def wrong(self, what: str, expected: str) -> ProtocolError:
        return ProtocolError(what, where=self._where, expected=expected)

    def take(self, piece: Piece, data: memoryview) -> None:
        if piece.offset == 0:
            self._begin(piece)
        good = piece.name == self._name and piece.offset == self._filled
        if not good or data.nbytes > self._memory.nbytes - self._filled:
            raise self.wrong(
                f"A piece of {piece.name!r} at {piece.offset} came", f"{self._name!r} to go on at {self._filled}"
            )
        self._memory[self._filled : self._filled + data.nbytes] = data
        self._filled += data.nbytes

    def _begin(self, piece: Piece) -> None:
        self._check_filled()
        if piece.name <= self._name and self.tensors:
            raise self.wrong(f"The tensor {piece.name!r} came after {self._name!r}", "names in order, each once")
        self._total += piece.spec.nbytes
        if len(self.tensors) >= MAX_TENSORS or self._total > MAX_STATE_BYTES:
            raise self.wrong(f"A state of over {len(self.tensors)} tensors and {self._total} bytes came", "less")
        made = self._room(piece)
        self.tensors[piece.name] = made
        self._name, self._filled = piece.name, 0
        self._memory = payload.dump(made)[1]

    def _room(self, piece: Piece) -> torch.Tensor:
        if self._expected is not None:
            like = self._expected.get(piece.name)
            if like is None or piece.spec != Spec(payload.dtype_name(like.dtype), tuple(like.shape)):
                raise self.wrong(
                    f"The tensor {piece.name!r} {list(piece.spec.shape)} {piece.spec.dtype} came",
                    "the tensors that this party trains",
                )
        return payload.empty(piece.spec)

    def _check_filled(self) -> None:
        if self._filled != self._memory.nbytes:
            raise self.wrong(
                f"{self._filled} bytes of {self._name!r} came", f"{self._memory.nbytes} before the next tensor"
            )

    def finish(self, whole: Whole, digest: bytes) -> None:
        self._check_filled()
        if whole.count != len(self.tensors) or whole.digest != digest or whole.samples < 0:
            raise self.wrong(f"A state of {len(self.tensors)} tensors does not have its digest", "what was sent")
        if self._expected is not None and self._expected.keys() != self.tensors.keys():
            missing = sorted(self._expected.keys() - self.tensors.keys())
            raise self.wrong(f"The tensor {missing[0]!r} did not come", "every tensor that this party trains")
