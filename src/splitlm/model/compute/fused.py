"""A transformer block in few operations: products merged and packed, norms and rotation in one call each.

What a block of transformers computes is described by a row of ``LAYOUTS``, by the name of its class; blocks of other
classes are not fused. A block that was fused is compared with itself before its own weights go (``packing.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from splitlm.model.cache import SessionCache
from splitlm.model.compute.attention import attend, rotate, visible
from splitlm.model.compute.compiled import RowAttention
from splitlm.model.compute.native.decoder import act_of, decoder
from splitlm.model.compute.products import Product


@dataclass(frozen=True)
class Layout:
    """Where a block of transformers keeps its parts.

    Attributes:
        attention, mlp: the two halves.
        query: products of the attention's way in, in the order query, key, value.
        out: its way out.
        up: products of the MLP's way in: gate and up, or one.
        down: its way out.
        act: the MLP's activation.
        norms: before attention, after it, before the MLP, after it; "" for none.
        gain: added to a norm's weight.
        rotary: whether queries and keys are rotated.
        softcap: attribute of the attention with the bound of its scores.
    """

    attention: str = "self_attn"
    mlp: str = "mlp"
    query: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    act: str = "act_fn"
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    gain: float = 0.0
    rotary: bool = True
    softcap: str = ""


_GEMMA = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
LAYOUTS: dict[str, Layout] = {
    "LlamaDecoderLayer": Layout(),
    "MistralDecoderLayer": Layout(),
    "Qwen2DecoderLayer": Layout(),
    "Qwen3DecoderLayer": Layout(),
    "Gemma2DecoderLayer": Layout(norms=_GEMMA, gain=1.0, softcap="attn_logit_softcapping"),
    "Gemma3DecoderLayer": Layout(norms=_GEMMA, gain=1.0),
    "GPT2Block": Layout(
        attention="attn",
        query=("c_attn",),
        out="c_proj",
        up=("c_fc",),
        down="c_proj",
        act="act",
        norms=("ln_1", "", "ln_2", ""),
        rotary=False,
    ),
}


@dataclass(frozen=True)
class Rows:
    """The rows of one session in a step: ``[begin, end)`` of all rows."""

    begin: int
    end: int
    cache: SessionCache


Packer = Callable[[torch.Tensor, torch.Tensor | None], Product]
Turn = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of every row of a step, see ``Rotary.rows``."""


class Norm(nn.Module):
    """RMS norm, or layer norm where there is a bias."""

    _given: tuple[torch.Tensor, torch.Tensor | None]

    def __init__(self, norm: Any, gain: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(norm.weight.detach().float() + gain, False)
        bias = getattr(norm, "bias", None)
        self.bias = None if bias is None else nn.Parameter(bias.detach().float(), False)
        found = [getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name)]
        self.eps = float(found[0])
        self.shape = tuple(self.weight.shape)
        self.least = self.shape[-1] * self.eps
        if self.bias is None:  # with √(‖x‖² + n·eps) under x, which are fewer and shorter calls than torch's rms_norm
            self.weight.mul_(self.shape[-1] ** 0.5)
            self.root = torch.tensor(self.least**0.5, dtype=torch.float32)
        self.__dict__["_given"] = (self.weight, self.bias)  # as attributes a module would look them up, each time

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Over the last dimension."""
        weight, bias = self._given
        if bias is not None:
            return functional.layer_norm(x, self.shape, weight, bias, self.eps)
        size = torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), self.root)
        return (x / size).mul_(weight)

    def of_rows(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """``forward`` for ``[n, hidden]``, compiled where it can be."""
        weight, bias = self._given
        compiled = decoder()
        if bias is not None or compiled is None:
            return self.forward
        return lambda x: compiled.norm(x, weight, self.least)


class FusedBlock(nn.Module):
    """One block; takes the place of the block that it was made from, whose index in the model it keeps.

    Args:
        block: of transformers, of a class in ``LAYOUTS``.
        pack: packs a matrix ``[out, in]`` and its bias.
        used: called with layers as soon as they are packed.

    Raises:
        AttributeError: the block lacks a part that its layout names.
    """

    _parts: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    _row: RowAttention | None

    def __init__(self, block: Any, pack: Packer, used: Callable[..., None]) -> None:
        super().__init__()
        layout = LAYOUTS[type(block).__name__]
        attention, mlp = getattr(block, layout.attention), getattr(block, layout.mlp)
        self.index = int(attention.layer_idx)
        self.dtype = next(block.parameters()).dtype
        self.kind = getattr(attention, "layer_type", None)
        self.rotary = layout.rotary
        self.head_dim = int(attention.head_dim)
        self.scale = float(attention.scaling)
        self.softcap = getattr(attention, layout.softcap) if layout.softcap else None
        self.act = getattr(mlp, layout.act)
        self.gated = len(layout.up) == 2
        self.before, self.after, self.before_mlp, self.after_mlp = (
            Norm(getattr(block, name), layout.gain) if name else None for name in layout.norms
        )
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self.q_norm, self.k_norm = (Norm(norm, layout.gain) if norm is not None else None for norm in norms)
        query, out = _layers(attention, layout.query), getattr(attention, layout.out)
        up, down = _layers(mlp, layout.up), getattr(mlp, layout.down)
        self.heads = matrix(out)[0].shape[1] // self.head_dim
        outputs = sum(matrix(layer)[0].shape[0] for layer in query)
        self.kv_heads = (outputs // self.head_dim - self.heads) // 2
        # The largest first: what is packed next to it is freed by then.
        self.up = _packed(pack, used, *up)
        self.down = _packed(pack, used, down)
        self.query = _packed(pack, used, *query)
        self.out = _packed(pack, used, out)
        products = (self.query.forward, self.out.forward, self.up.forward, self.down.forward)
        sizes = tuple(_call(norm) for norm in (self.before, self.after, self.before_mlp, self.after_mlp))
        self.__dict__["_parts"] = (*products, *sizes, _activation(self.act.forward, self.gated))
        fits = self.softcap is None and self.dtype is torch.float32
        fits &= all(norm is None or norm.shape == (self.head_dim,) for norm in (self.q_norm, self.k_norm))
        compiled = decoder() if fits else None
        self.__dict__["_row"] = None if compiled is None else RowAttention(compiled, self)

    def forward(self, x: torch.Tensor, rows: Sequence[Rows], turn: Turn | None) -> torch.Tensor:
        """``[n, hidden]`` to the same shape, in float32; the sessions' KV grows by their rows.

        Parts are called past ``nn.Module``, which looks for them by name and for hooks: what that costs, ten times for
        each block and token, shows.

        Args:
            turn: where the block rotates.
        """
        product, out, widen, narrow, before, after, before_mlp, after_mlp, act = self._parts
        x = x + after(out(self._attended(product(before(x)), rows, turn)))
        return x + after_mlp(narrow(act(widen(before_mlp(x)))))

    def _attended(self, r: torch.Tensor, rows: Sequence[Rows], turn: Turn | None) -> torch.Tensor:
        """``[n, (heads + 2 kv_heads) * head_dim]``, neither normed nor rotated yet, to ``[n, heads * head_dim]``.

        How a session's rows are computed depends on their number alone, not on what else is in the step.
        """
        if self._row is None:
            query, key, value = self._turned(r, turn)
            if self.softcap is None and len(rows) == len(r):
                return self._decoded(query, key, value, rows)
            return torch.cat([self._attention(query, key, value, part) for part in rows])
        r = r.contiguous()
        seen = torch.empty(len(r), self.heads * self.head_dim, dtype=torch.float32)
        for part in rows:
            if part.end == part.begin + 1:
                self._row(r, part.begin, turn, part.cache.by_block[self.index], seen)
            else:
                some = slice(part.begin, part.end)
                new = self._turned(r[some], None if turn is None else (turn[0][some], turn[1][some]))
                seen[some] = self._attention(*new, Rows(0, part.end - part.begin, part.cache))
        return seen

    def _turned(self, r: torch.Tensor, turn: Turn | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values ``[n, their heads, head_dim]``, normed and rotated where the block does that."""
        heads, kv_heads = self.heads, self.kv_heads
        r = r.view(-1, heads + 2 * kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            turning = torch.cat([self.q_norm(r[:, :heads]), self.k_norm(r[:, heads : heads + kv_heads])], 1)
        else:
            turning = r[:, : heads + kv_heads]
        if turn is not None:
            turning = rotate(turning, *turn)
        return turning[:, :heads], turning[:, heads:], r[:, heads + kv_heads :]

    def _decoded(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: Sequence[Rows]
    ) -> torch.Tensor:
        """Attention where each session has one row, which sees all that is kept of it."""
        # The query heads of a group are further rows over the same keys.
        queries = query.to(self.dtype).reshape(len(rows), 1, self.kv_heads, -1, self.head_dim).unbind()
        found = [
            functional.scaled_dot_product_attention(
                q, *part.cache.by_block[self.index].step(k, v, self.dtype), scale=self.scale
            )
            for q, k, v, part in zip(queries, key.unbind(), value.unbind(), rows, strict=True)
        ]
        return (found[0] if len(found) == 1 else torch.cat(found)).reshape(len(rows), -1).float()

    def _attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, part: Rows) -> torch.Tensor:
        kv = part.cache.by_block[self.index]
        q, k, v = query[part.begin : part.end], key[part.begin : part.end], value[part.begin : part.end]
        keys, values = kv.append(k.to(self.dtype), v.to(self.dtype))
        mask = visible(q.shape[0], keys.shape[0], kv.window)
        return attend(q, keys, values, self.scale, mask, self.softcap)


def matrix(layer: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight ``[out, in]`` and bias of a linear layer, or of GPT-2's, which stores its weight the other way round."""
    weight = layer.weight.detach()
    bias = getattr(layer, "bias", None)
    return (weight.t() if type(layer).__name__ == "Conv1D" else weight), None if bias is None else bias.detach()


def _layers(owner: Any, names: Sequence[str]) -> list[Any]:
    return [getattr(owner, name) for name in names]


def _packed(pack: Packer, used: Callable[..., None], *layers: Any) -> Product:
    """Layers of one input as one product."""
    product = pack(*_merged([matrix(layer) for layer in layers]))
    used(*layers)
    return product


def _merged(parts: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> tuple[torch.Tensor, torch.Tensor | None]:
    if len(parts) == 1:
        return parts[0]
    weights = [weight for weight, _ in parts]
    if all(bias is None for _, bias in parts):
        return torch.cat(weights), None
    return torch.cat(weights), torch.cat([w.new_zeros(w.shape[0]) if b is None else b for w, b in parts])


def _call(norm: Norm | None) -> Callable[[torch.Tensor], torch.Tensor]:
    return _same if norm is None else norm.of_rows()


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _activation(act: Callable[[torch.Tensor], torch.Tensor], gated: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """From what the MLP's way in gives to what its way out takes, compiled where it can be."""
    compiled = decoder()
    if compiled is not None and (number := act_of(act)) is not None:
        return lambda up: compiled.activate(up, number, gated)
    return (lambda up: _gate(act, up)) if gated else act


def _gate(act: Callable[[torch.Tensor], torch.Tensor], up: torch.Tensor) -> torch.Tensor:
    gate, up = up.chunk(2, -1)
    return act(gate).mul_(up)
