"""Attention of one row of one session by the compiled steps, from what a block's products give to what they take."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from splitlm.model.cache import BlockKV
from splitlm.model.compute.native.decoder import Decoder, Heads

_FLOAT = 4


class RowAttention:
    """Of one block, in float32.

    Args:
        decoder: the compiled steps.
        block: a ``FusedBlock`` without a bound of its scores.
    """

    def __init__(self, decoder: Decoder, block: Any) -> None:
        self._decoder = decoder
        self._norms = block.q_norm, block.k_norm  # whose weights have to stay where they are
        q, k = self._norms if None not in self._norms else (None, None)
        self._heads = Heads(
            block.heads,
            block.kv_heads,
            block.head_dim,
            None if q is None else q.weight.data_ptr(),
            None if k is None else k.weight.data_ptr(),
            0.0 if q is None else q.least,
            0.0 if k is None else k.least,
            block.scale,
        )
        self._of = ctypes.addressof(self._heads)
        self._shape = (block.kv_heads, block.head_dim)
        self._stride = block.kv_heads * block.head_dim * _FLOAT

    def __call__(
        self,
        rows: torch.Tensor,
        row: int,
        turn: tuple[torch.Tensor, torch.Tensor] | None,
        kv: BlockKV,
        out: torch.Tensor,
    ) -> None:
        """Row ``row`` of ``rows`` to that of ``out``, ``[n, heads * head_dim]``; the session's KV grows by it.

        Args:
            rows: query, key and value heads ``[n, (heads + 2 kv_heads) * head_dim]``, before norms and rotation.
            turn: cosines and sines of every row, ``[n, 1, head_dim]``; None for no rotation.
        """
        keys, values, first, seen = kv.place(self._shape, torch.float32)
        at = first * self._stride
        width = _FLOAT * self._shape[1] * row
        turned = (0, 0) if turn is None else (turn[0].data_ptr() + width, turn[1].data_ptr() + width)
        self._decoder.attend(
            self._of,
            rows.data_ptr() + _FLOAT * rows.shape[1] * row,
            turned,
            keys.data_ptr() + at,
            values.data_ptr() + at,
            seen,
            out.data_ptr() + _FLOAT * out.shape[1] * row,
        )
