"""Keys and values of one session: one layout for every engine, rows in token order.

A block's keys are stored as ``[rows, kv_heads, head_dim]`` (values alike) in a buffer that grows by steps, so that a
decode step appends one row instead of copying the whole cache. Rows of consecutive tokens are contiguous bytes. A
sliding-window block keeps the last ``window − 1`` rows; how many tokens it has seen is a number of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from splitlm.core.errors import ProtocolError

GROWTH_ROWS = 64


class BlockKV(CacheLayerMixin):  # type: ignore[misc]
    """KV of one block in one session, as transformers' attention modules expect a cache layer.

    Args:
        window: sliding window in tokens, or None for full attention.
    """

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window
        self.is_sliding = window is not None
        self.seen = 0
        self._start = 0
        self._rows = 0
        self._k: torch.Tensor | None = None
        self._v: torch.Tensor | None = None
        self._laid: tuple[torch.Tensor, torch.Tensor] | None = None  # both buffers as attention takes them
        self._fits: tuple[Sequence[int], torch.dtype] | None = None  # of a row that these buffers take, once checked

    @property
    def rows(self) -> int:
        """Rows kept: ``min(seen, window − 1)`` for a sliding block, else all."""
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of the rows kept (keys and values), without room to grow."""
        if self._k is None or self._v is None or not self._k.shape[0]:
            return 0
        # Asked once per token on the way between two stages: without making views.
        return self._rows * ((self._k.nbytes + self._v.nbytes) // self._k.shape[0])

    @property
    def allocated(self) -> int:
        """Bytes of the buffers, room to grow included: that of ``max(64, 1/16)`` more rows at most."""
        return 0 if self._k is None or self._v is None else self._k.nbytes + self._v.nbytes

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[1, kv_heads, n, head_dim]`` keys and values; return those the new rows may see, same layout.

        What is returned may lie in the buffers: it is valid until the next update.

        Raises:
            ProtocolError: more than one sequence.
        """
        if key.shape[0] != 1:
            raise ProtocolError(f"{key.shape[0]} sequences came in one step", expected="one session per forward")
        keys, values = self.append(key[0].transpose(0, 1), value[0].transpose(0, 1))
        return keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)

    def append(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``update`` for ``[n, kv_heads, head_dim]``, and what comes back is laid out so too."""
        n, before = key.shape[0], self._rows
        keep = before + n if self.window is None else min(before + n, self.window - 1)
        self.seen += n
        self.is_initialized = True
        if self._k is None or self._v is None or self._start + before + n > self._k.shape[0]:
            if before + n > keep + _room(keep) // 2:  # a long prefill into a window: not all its rows will be kept
                return self._replace(key, value, keep)
            self._resize(key, value, keep)
        k, v = cast(torch.Tensor, self._k), cast(torch.Tensor, self._v)
        first, end = self._start, self._start + before
        k[end : end + n] = key
        v[end : end + n] = value
        self._start, self._rows = end + n - keep, keep
        return k[first : end + n], v[first : end + n]

    def step(self, key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """``update`` for one row, ``[kv_heads, head_dim]`` of any element type; ``dtype`` is that of the rows kept.

        Every token takes this way once for each block and session: with as few calls as can be.
        """
        k, v, first, rows = self.place(key.shape, dtype)
        if self._laid is None:
            self._laid = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
        k.select(0, first + rows - 1).copy_(key)
        v.select(0, first + rows - 1).copy_(value)
        return self._laid[0].narrow(2, first, rows), self._laid[1].narrow(2, first, rows)

    def place(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """Room for one more row, which counts as there from now on: the caller writes it.

        Args:
            shape: of a row, ``[kv_heads, head_dim]``.

        Returns:
            The buffers of keys and values, the first row in them that the new one sees, and how many it sees: itself
            is the last. Valid until the next update.

        Raises:
            ProtocolError: the rows kept so far are of another shape or element type.
        """
        before, first = self._rows, self._start
        if self._fits != (shape, dtype):
            self._check(shape, dtype)
            self._fits = (shape, dtype)
        if self._k is None or self._v is None or first + before >= self._k.shape[0]:
            like = torch.empty(0, *shape, dtype=dtype)
            self._resize(like, like, before + 1)
            first = 0
        self.seen += 1
        self.is_initialized = True
        if self.window is None or before + 1 < self.window:
            self._rows = before + 1
        else:
            self._start = first + 1
        return cast(torch.Tensor, self._k), cast(torch.Tensor, self._v), first, before + 1

    def _check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        for kept in (self._k, self._v):
            if kept is not None and (kept.dtype is not dtype or kept.shape[1:] != shape):
                raise ProtocolError(
                    f"A KV row of {list(shape)} {dtype} came to rows of {list(kept.shape[1:])} {kept.dtype}"
                )

    def take(self, first: int, limit: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """A copy of up to ``limit`` rows from absolute position ``first`` on, for another node.

        Returns:
            Keys and values ``[n, kv_heads, head_dim]``, and the position of the first of them: later than ``first``
            where a sliding window has dropped earlier rows. n is 0 when nothing is there.
        """
        begin = max(first, self.seen - self._rows)
        k, v = self._kept()
        skip = begin - (self.seen - self._rows)
        return k[skip : skip + limit].clone(), v[skip : skip + limit].clone(), begin

    def extend(self, key: torch.Tensor, value: torch.Tensor, position: int) -> None:
        """Append rows that another node took; ``[n, kv_heads, head_dim]`` each, of consecutive positions.

        Raises:
            ProtocolError: they leave a gap that the window does not explain, overlap, or are of another shape.
        """
        shapes = [key.shape[1:], value.shape[1:]] if key.dim() == value.dim() == 3 else []
        kept = self._kept()
        if self._k is not None and shapes != [kept[0].shape[1:], kept[1].shape[1:]]:
            shapes = []
        if not shapes or key.shape[0] != value.shape[0]:
            raise ProtocolError(
                f"KV rows of shapes {list(key.shape)} and {list(value.shape)} came", expected="[n, heads, d]"
            )
        if position < self.seen or (position > self.seen and self.window is None):
            raise ProtocolError(f"KV rows from position {position} came", expected=f"position {self.seen}")
        if position > self.seen:  # what lies between has left the window, and with it all before
            self._start += self._rows
            self._rows, self.seen = 0, position
        self.append(key, value)

    def _resize(self, key: torch.Tensor, value: torch.Tensor, keep: int) -> None:
        """Buffers for ``keep`` rows with room to grow, the rows kept so far at their beginning."""
        kept, self._k, self._v = self._kept(), _buffer(keep, key), _buffer(keep, value)
        self._laid = self._fits = None
        if self._rows:
            self._k[: self._rows] = kept[0]
            self._v[: self._rows] = kept[1]
        self._start = 0

    def _replace(self, key: torch.Tensor, value: torch.Tensor, keep: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the last ``keep`` rows in buffers of that size; return the rows kept before and all the new ones."""
        seen, fresh = [], []
        for before, new in zip(self._kept(), (key, value), strict=True):
            rows = torch.cat([before, new]) if self._rows else new.contiguous()
            buffer = _buffer(keep, new)
            buffer[:keep] = rows[rows.shape[0] - keep :]
            seen.append(rows)
            fresh.append(buffer)
        self._k, self._v = fresh
        self._laid = self._fits = None
        self._start, self._rows = 0, keep
        return seen[0], seen[1]

    def _kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows kept, ``[rows, kv_heads, head_dim]`` each."""
        if self._k is None or self._v is None:
            return torch.empty(0), torch.empty(0)
        rows = slice(self._start, self._start + self._rows)
        return self._k[rows], self._v[rows]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: buffers are made by the first update."""

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that ``query_length`` new rows will meet, and the position of the first of them."""
        return self._rows + query_length, self.seen - self._rows

    def get_max_length(self) -> int:
        """The window, or −1 for no bound."""
        return -1 if self.window is None else self.window


class SessionCache(Cache):  # type: ignore[misc]
    """KV of one session on one stage.

    Attention modules name their block by its index in the whole model; masks are sized by place on this stage.

    Args:
        blocks: indices of the stage's blocks, in order.
        windows: their sliding windows, or None.
    """

    def __init__(self, blocks: Sequence[int], windows: Sequence[int | None]) -> None:
        layers = [BlockKV(window) for window in windows]
        super().__init__(layers=layers)
        self.by_block = dict(zip(blocks, layers, strict=True))
        self.seen = 0

    def rearrange(
        self, blocks: Sequence[int], windows: Sequence[int | None], brought: Mapping[int, BlockKV]
    ) -> dict[int, BlockKV]:
        """Hold these blocks from now on; returns the KV of those that left.

        Args:
            brought: KV of blocks that were not here; a block in neither is empty.
        """
        old = self.by_block
        self.by_block = {
            block: old.get(block) or brought.get(block) or BlockKV(window)
            for block, window in zip(blocks, windows, strict=True)
        }
        self.layers = list(self.by_block.values())
        return {block: kv for block, kv in old.items() if block not in self.by_block}

    @property
    def nbytes(self) -> int:
        """Bytes of all rows kept."""
        return sum(layer.nbytes for layer in self.by_block.values())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``BlockKV.update``; ``layer_idx`` is the block's index in the whole model."""
        return self.by_block[layer_idx].update(key_states, value_states)


def _room(rows: int) -> int:
    """Rows to grow by, so that copying costs a constant number of rows per token."""
    return max(GROWTH_ROWS, rows // 16)


def _buffer(rows: int, like: torch.Tensor) -> torch.Tensor:
    """Memory for ``rows`` rows and room to grow."""
    return torch.empty(rows + _room(rows), *like.shape[1:], dtype=like.dtype, device=like.device)
