"""Attention of one session's new rows over its keys and values, and the rotation of both."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

ROTARY_ROWS = 256


class Rotary:
    """Cosines and sines of positions, computed by the model's own module and kept.

    Args:
        module: transformers' rotary module.
        kind: which of its kinds of layers, where it has several.
        like: a tensor of the device and element type to compute in.
    """

    def __init__(self, module: Any, kind: str | None, like: torch.Tensor) -> None:
        self._module, self._kind, self._like = module, kind, like
        self._cos, self._sin = self._computed(ROTARY_ROWS)

    def rows(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of positions ``[begin, end)``: ``[n, 1, head_dim]`` each; the sines of a head's first half are negated."""
        have = self._cos.shape[0]
        if end > have:
            self._cos, self._sin = self._computed(max(end, 2 * have))
        return self._cos[begin:end], self._sin[begin:end]

    def _computed(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        more = () if self._kind is None else (self._kind,)
        cos, sin = self._module(self._like, torch.arange(rows).unsqueeze(0), *more)
        cos, sin = cos[0].float(), sin[0].float()
        half = sin.shape[-1] // 2
        return cos.unsqueeze(1).contiguous(), torch.cat([-sin[:, :half], sin[:, half:]], -1).unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of ``[n, heads, head_dim]``; ``sin`` as ``Rotary.rows`` gives it."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def visible(rows: int, keys: int, window: int | None) -> torch.Tensor | None:
    """Which of ``keys`` keys the last ``rows`` of them may see, ``[rows, keys]``; None where that is all.

    Args:
        window: how many keys a row sees at most, itself included.
    """
    if rows == 1:
        return None
    mask = torch.ones(rows, keys, dtype=torch.bool).tril_(keys - rows)
    return mask if window is None else mask.triu_(keys - rows - window + 1)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of ``[n, heads, d]`` queries over ``[keys, kv_heads, d]``; ``[n, heads * d]`` comes back.

    Args:
        mask: see ``visible``.
        softcap: bound of the scores, which are bent towards it.
    """
    n, heads, width = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    key, value = key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0)
    # The query heads of a group are further rows over the same keys: nothing has to be repeated.
    q = query.view(n, kv_heads, group, width).permute(1, 2, 0, 3).reshape(1, kv_heads, group * n, width)
    if mask is not None and group > 1:
        mask = mask.repeat(group, 1)
    q = q.to(key.dtype)
    if softcap is None:
        out = functional.scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=scale)
    else:
        scores = torch.matmul(q, key.transpose(2, 3)).float() * scale
        scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        out = torch.matmul(scores.softmax(-1).to(value.dtype), value)
    out = out.view(kv_heads, group, n, width).permute(2, 0, 1, 3)
    return out.reshape(n, heads * width).to(query.dtype)
