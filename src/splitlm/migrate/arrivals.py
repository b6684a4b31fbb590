"""KV rows as they come from one neighbour, until a mark says that they were the last."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from splitlm.core.errors import ProtocolError
from splitlm.model import payload
from splitlm.model.cache import BlockKV
from splitlm.wire.frame import Frame, Mark, Rows


class Arrivals:
    """What one neighbour sent for the newest change that it takes part in.

    Args:
        windows: sliding window of every block of the model.
        where: the neighbour, for messages.
    """

    def __init__(self, windows: Sequence[int | None], where: str) -> None:
        self._windows, self._where = windows, where
        self._number = 0
        self._dropped = 0
        self._rows: dict[tuple[int, int], BlockKV] = {}
        self._mark: Mark | None = None
        self._changed = asyncio.Event()

    def take(self, frame: Frame) -> None:
        """One frame of the neighbour's link.

        Raises:
            ProtocolError: not a frame of a move, or rows that do not follow those before.
        """
        header = frame.header
        if not isinstance(header, Rows | Mark):
            raise ProtocolError(f"A {type(header).__name__} frame came", where=self._where, expected="Rows or Mark")
        if header.change <= self._dropped or header.change < self._number:
            return  # of a change that was given up
        if header.change > self._number:
            self._number, self._mark = header.change, None
            self._rows.clear()
        if isinstance(header, Mark):
            self._mark = header
            self._changed.set()
            return
        if not 0 <= header.block < len(self._windows) or len(frame.tensors) != 2:
            raise ProtocolError(
                f"Rows of block {header.block} came", where=self._where, expected="keys and values of a block"
            )
        key, value = (payload.load(spec, view) for spec, view in zip(header.tensors, frame.tensors, strict=True))
        kv = self._rows.setdefault((header.block, header.session), BlockKV(self._windows[header.block]))
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
            window = self._windows[block]
            for session, seen in sessions.items():
                kv = self._rows.get((block, session)) or BlockKV(window)
                due = seen if window is None else min(seen, window - 1)
                if (kv.seen, kv.rows) != (seen, due):
                    raise ProtocolError(
                        f"Session {session} of block {block} came with {kv.rows} rows of {kv.seen} tokens",
                        where=self._where,
                        expected=f"{due} rows of {seen} tokens",
                    )
                size += kv.nbytes
                rows += kv.rows
        return size, rows

    def pick(self, block: int) -> dict[int, BlockKV]:
        """Take a block's KV out, by session."""
        found = {session: kv for (b, session), kv in self._rows.items() if b == block}
        for session in found:
            del self._rows[block, session]
        return found

    def drop(self) -> None:
        """Forget what came, and what is still on its way for the same change."""
        self._dropped = self._number
        self._rows.clear()
        self._mark = None
