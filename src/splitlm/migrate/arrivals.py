"""KV rows that a neighbour sends: gathered beside the stage, which knows nothing of them before a commit.

The sender numbers its changes of the cut. A higher number replaces what came for those below, so what lies here is
always of the newest change that the neighbour has not given up; which barrier it is for is said by the ``Mark`` at its
end. The receiver's own aborts touch nothing here: rows of the neighbour's next change may be here already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from splitlm.core.errors import ProtocolError
from splitlm.model import payload
from splitlm.model.cache import BlockKV
from splitlm.wire.frame import Frame, Mark, Rows

GIVEN_UP = 0
"""As a mark's barrier, of which no real one has this number: nothing of the change is wanted any more."""


@dataclass(frozen=True)
class KVShape:
    """What a model's KV rows look like.

    Attributes:
        windows: sliding window of each block, or None.
        heads: KV heads, and ``width`` values in each.
        context: most tokens of a session.
    """

    windows: Sequence[int | None]
    heads: int
    width: int
    dtype: torch.dtype
    context: int

    def kept(self, block: int, seen: int) -> int:
        """Rows that a block keeps of so many tokens."""
        window = self.windows[block]
        return seen if window is None else min(seen, window - 1)

    @property
    def row_bytes(self) -> int:
        """Keys and values of one token in one block."""
        return 2 * self.heads * self.width * self.dtype.itemsize


class Arrivals:
    """What one neighbour sent.

    Args:
        where: the neighbour, for messages.
    """

    def __init__(self, shape: KVShape, where: str) -> None:
        self._shape, self._where = shape, where
        self._number = 0
        self._rows: dict[tuple[int, int], BlockKV] = {}
        self._mark: Mark | None = None
        self._changed = asyncio.Event()

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that lie here."""
        return sum(kv.nbytes for kv in self._rows.values())

    def take(self, frame: Frame) -> None:
        """One frame of the neighbour's link.

        Raises:
            ProtocolError: not a frame of a move, or rows that are not this model's or do not follow those before.
        """
        header = frame.header
        if not isinstance(header, Rows | Mark):
            raise ProtocolError(f"A {type(header).__name__} frame came", where=self._where, expected="Rows or Mark")
        if header.change < self._number:
            raise ProtocolError(
                f"A frame of change {header.change} came", where=self._where, expected=f"{self._number} or a later one"
            )
        if header.change > self._number:
            self._number = header.change
            self.clear()
        if isinstance(header, Rows):
            self._take_rows(header, frame)
        elif header.seq == GIVEN_UP:
            self.clear()
        else:
            self._mark = header
            self._changed.set()

    def _take_rows(self, header: Rows, frame: Frame) -> None:
        shape, what = self._shape, f"Rows of block {header.block} in session {header.session} came"
        if self._mark is not None:
            raise ProtocolError(f"{what} after the mark of their change", where=self._where, expected="rows before it")
        if not 0 <= header.block < len(shape.windows) or len(frame.tensors) != 2:
            raise ProtocolError(
                f"{what} in {len(frame.tensors)} tensors", where=self._where, expected="keys and values of a block"
            )
        key, value = (payload.load(spec, view) for spec, view in zip(header.tensors, frame.tensors, strict=True))
        for rows in (key, value):
            good = rows.dim() == 3 and rows.shape[0] > 0 and tuple(rows.shape[1:]) == (shape.heads, shape.width)
            if not good or rows.dtype != shape.dtype or rows.shape[0] != key.shape[0]:
                raise ProtocolError(
                    f"{what} of shape {list(rows.shape)} and type {rows.dtype}",
                    where=self._where,
                    expected=f"keys and values [n, {shape.heads}, {shape.width}] {shape.dtype}",
                )
        if header.position < 0 or header.position + key.shape[0] > shape.context:
            raise ProtocolError(
                f"{what} for positions from {header.position} to {header.position + key.shape[0] - 1}",
                where=self._where,
                expected=f"positions from 0 to {shape.context - 1}",
            )
        kv = self._rows.setdefault((header.block, header.session), BlockKV(shape.windows[header.block]))
        kv.extend(key, value, header.position)

    async def complete(self, seq: int, blocks: Sequence[int], sessions: Mapping[int, int]) -> tuple[int, int]:
        """Wait for the mark of barrier ``seq``, and check that exactly what was due has come.

        Args:
            blocks: that come from this neighbour.
            sessions: tokens that each session has seen.

        Returns:
            Bytes and rows of KV to be installed.

        Raises:
            ProtocolError: the neighbour has other sessions, or rows are missing or too many.
        """
        while self._mark is None or self._mark.seq != seq:
            self._changed.clear()
            await self._changed.wait()
        if dict(self._mark.sessions) != dict(sessions):
            raise ProtocolError(
                f"The neighbour's sessions are {dict(self._mark.sessions)}",
                where=self._where,
                expected=f"{dict(sessions)}: the same tokens on every stage",
            )
        size = rows = 0
        for block in blocks:
            for session, seen in sessions.items():
                kv, due = self._rows.get((block, session)), self._shape.kept(block, seen)
                came = (kv.seen, kv.rows, kv.nbytes) if kv is not None else (0, 0, 0)
                if came != (seen, due, due * self._shape.row_bytes):
                    raise ProtocolError(
                        f"Session {session} of block {block} came with {came[1]} rows ({came[2]} bytes) "
                        f"of {came[0]} tokens",
                        where=self._where,
                        expected=f"{due} rows ({due * self._shape.row_bytes} bytes) of {seen} tokens",
                    )
                size += came[2]
                rows += came[1]
        return size, rows

    def pick(self, block: int) -> dict[int, BlockKV]:
        """Take a block's KV out, by session."""
        found = {session: kv for (b, session), kv in self._rows.items() if b == block}
        for session in found:
            del self._rows[block, session]
        return found

    def clear(self) -> None:
        """Forget what came."""
        self._rows.clear()
        self._mark = None
