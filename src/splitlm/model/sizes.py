"""What each segment of a cut would hold, from a model's config alone: nothing is read, nothing is allocated.

The model is built by transformers itself on torch's meta device, so its parts are those that a ring loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from splitlm.core.cut import Cut, Segment
from splitlm.core.errors import CutError, UsageError
from splitlm.model.border import foreign
from splitlm.model.config import context_of, read_config
from splitlm.model.family import check_layout, find_family
from splitlm.model.index import read_json
from splitlm.model.load import BLOCK_BYTES, DTYPES
from splitlm.model.oneatatime import one_at_a_time


@dataclass(frozen=True)
class SegmentSizes:
    """What one segment adds to the node that holds it.

    Attributes:
        parameters: elements of its weights. A tied table is part of the first and of the last segment; where one node
            holds both, it is counted with the first alone.
        weight_bytes: of these parameters. Buffers (rotary frequencies, some hundred bytes) are left out.
        kv_bytes_per_token: keys and values that one more token of a session takes, in all blocks.
        kv_cap_bytes: the most that one session can take: a block with full attention keeps the whole context, one with
            a sliding window keeps ``window − 1`` tokens.
    """

    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_cap_bytes: int


class ModelShape:
    """The parts of a model and their sizes.

    Args:
        source: a model directory (its ``config.json`` is enough), or the content of a ``config.json``.
        dtype: of the weights: ``auto`` (the config's own, else float32), or a name, or torch's value.
        family: name of a family, where the config does not say.

    Attributes:
        blocks: number of blocks.
        context: the longest text in tokens.
        windows: sliding window of each block in tokens, or None.

    Raises:
        CheckpointError: the config is damaged.
        UnknownFamilyError: no family has this layout.
        UsageError: an unknown dtype.
    """

    def __init__(
        self, source: Path | Mapping[str, Any], dtype: str | torch.dtype = "auto", *, family: str = ""
    ) -> None:
        config, layout, where = _read(source, family)
        self.dtype = _dtype(dtype, config)
        with foreign("transformers cannot build the model", where, f"the config of a {layout.name} model"):
            with one_at_a_time(), torch.device("meta"):
                self._model: Any = AutoModelForCausalLM.from_config(config, dtype=self.dtype)
            self.windows = block_windows(config)
        check_layout(self._model, layout, where)
        self._family = layout
        self.blocks = int(config.num_hidden_layers)
        self.context = context_of(config)
        heads = int(config.num_attention_heads)
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "head_dim", None) or int(config.hidden_size) // heads
        self.row_bytes = 2 * int(kv_heads) * int(width) * self.dtype.itemsize
        """Keys and values of one token in one block."""

    @property
    def head_cost(self) -> float:
        """What the head costs per token, in blocks; as ``ModelFiles.head_cost``, so that both choose the same cut."""
        block = sum(p.nbytes for p in self._layers[0].parameters())
        return float(getattr(self._model, self._family.head).weight.nbytes / (block + BLOCK_BYTES)) if block else 0.0

    def sizes(self, cut: Cut) -> list[SegmentSizes]:
        """The sizes of each segment, in the order of the cut.

        Raises:
            CutError: the cut is of a model with another number of blocks.
        """
        if cut.blocks != self.blocks:
            raise CutError(f"The cut is of {cut.blocks} blocks", expected=f"one of this model's {self.blocks}")
        held: dict[int, set[int]] = {}
        return [
            self.size(segment, held.setdefault(node, set()))
            for segment, node in zip(cut.segments, cut.nodes, strict=True)
        ]

    @property
    def _layers(self) -> Any:
        return self._family.blocks_of(getattr(self._model, self._family.base))

    def size(self, segment: Segment, seen: set[int]) -> SegmentSizes:
        """Sizes of a segment on a node that holds the tensors in ``seen`` already."""
        new = []
        for tensor in self._tensors(segment):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                new.append(tensor)
        kept = [self.context if (w := self.windows[i]) is None else min(self.context, w - 1) for i in segment.blocks]
        return SegmentSizes(
            parameters=sum(tensor.numel() for tensor in new),
            weight_bytes=sum(tensor.nbytes for tensor in new),
            kv_bytes_per_token=self.row_bytes * segment.count,
            kv_cap_bytes=self.row_bytes * sum(kept),
        )

    def _tensors(self, segment: Segment) -> Iterator[torch.Tensor]:
        base, family = getattr(self._model, self._family.base), self._family
        modules: list[nn.Module] = [self._layers[i] for i in segment.blocks]
        if segment.embed:
            modules.append(getattr(base, family.embed))
            modules += [getattr(base, family.positions)] if family.positions else []
        if segment.head:
            modules += [getattr(base, family.norm), getattr(self._model, family.head)]
        for module in modules:
            yield from module.parameters()


def segment_sizes(
    source: Path | Mapping[str, Any], cut: Cut, dtype: str | torch.dtype = "auto", *, family: str = ""
) -> list[SegmentSizes]:
    """What each segment of a cut adds to its node; see ``ModelShape`` for arguments and errors."""
    return ModelShape(source, dtype, family=family).sizes(cut)


def block_windows(config: Any) -> list[int | None]:
    """The sliding window of each block, as transformers' own cache would choose it."""
    layers = DynamicCache(config=config).layers
    return [getattr(layers[i], "sliding_window", None) if layers else None for i in range(config.num_hidden_layers)]


def _read(source: Path | Mapping[str, Any], family: str) -> tuple[Any, Any, str]:
    if isinstance(source, Path):
        raw, where = read_json(source / "config.json"), str(source / "config.json")
        layout = find_family(str(raw.get("model_type")), family, where)
        return read_config(source, raw, layout), layout, where
    kind, where = str(source.get("model_type")), "config"
    layout = find_family(kind, family, where)
    with foreign("transformers cannot read the config", where, f"the config of a {layout.name} model"):
        options = {key: value for key, value in source.items() if key != "model_type"}
        return AutoConfig.for_model(kind, **options), layout, where


def _dtype(asked: str | torch.dtype, config: Any) -> torch.dtype:
    if isinstance(asked, torch.dtype):
        return asked
    if asked == "auto":
        told: torch.dtype | None = getattr(config, "dtype", None)
        return told or torch.float32
    if asked not in DTYPES:
        raise UsageError(f"{asked!r} is no element type", where="--dtype", expected=f"auto, {', '.join(DTYPES)}")
    return DTYPES[asked]
