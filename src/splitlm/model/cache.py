"""Keys and values of one session: one layout for every engine, rows in token order.

A block's keys are stored as ``[rows, kv_heads, head_dim]`` (values alike) in a buffer that grows by steps, so that a
decode step appends one row instead of copying the whole cache. Rows of consecutive tokens are contiguous bytes. A
sliding-window block keeps the last ``window − 1`` rows; how many tokens it has seen is a number of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

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

    @property
    def rows(self) -> int:
        """Rows kept: ``min(seen, window − 1)`` for a sliding block, else all."""
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of the rows kept (keys and values), without room to grow."""
        if self._k is None or self._v is None or not self._k.shape[0]:
            return 0
        return self._rows * (self._k[0].nbytes + self._v[0].nbytes)

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[1, kv_heads, n, head_dim]`` keys and values; return those the new rows may see, same layout."""
        n = key.shape[2]
        k, v = self._room(n, key, value)
        end = self._start + self._rows
        k[end : end + n] = key[0].transpose(0, 1)
        v[end : end + n] = value[0].transpose(0, 1)
        first, last = self._start, end + n
        self.seen += n
        self._rows += n
        if self.window is not None and self._rows > self.window - 1:
            self._start += self._rows - (self.window - 1)
            self._rows = self.window - 1
        self.is_initialized = True
        return k[first:last].transpose(0, 1).unsqueeze(0), v[first:last].transpose(0, 1).unsqueeze(0)

    def _room(self, n: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Buffers with space for ``n`` more rows after the kept ones."""
        need = self._rows + n
        if self._k is not None and self._v is not None and self._start + need <= self._k.shape[0]:
            return self._k, self._v
        size = need + max(GROWTH_ROWS, need // 16)
        old, kept = (self._k, self._v), slice(self._start, self._start + self._rows)
        fresh = []
        for like, before in zip((key, value), old, strict=True):
            buffer = torch.empty(size, like.shape[1], like.shape[3], dtype=like.dtype, device=like.device)
            if before is not None:
                buffer[: self._rows] = before[kept]
            fresh.append(buffer)
        self._k, self._v = fresh
        self._start = 0
        return self._k, self._v

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

    @property
    def nbytes(self) -> int:
        """Bytes of all rows kept."""
        return sum(layer.nbytes for layer in self.by_block.values())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``BlockKV.update``; ``layer_idx`` is the block's index in the whole model."""
        return self.by_block[layer_idx].update(key_states, value_states)
