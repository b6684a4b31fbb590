"""What a config and the tensors beside it must agree on before anything is built: element type, sliding windows."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from splitlm.core.errors import CheckpointError, UnknownFamilyError, UsageError
from splitlm.model.border import foreign
from splitlm.model.index import CheckpointIndex

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def element_type(name: str, index: CheckpointIndex, config: Any) -> torch.dtype:
    """The element type to load with: as asked, or for ``auto`` the one that config and tensors agree on.

    Raises:
        UsageError: an unknown name.
        CheckpointError: config and tensors do not agree, or the tensors are of several types.
    """
    folder = str(index.folder)
    if name != "auto":
        if name not in DTYPES:
            raise UsageError(f"{name!r} is no element type", where="--dtype", expected="auto, " + ", ".join(DTYPES))
        return DTYPES[name]
    stored = {entry.dtype for entry in index.entries.values() if entry.dtype.is_floating_point}
    told = getattr(config, "dtype", None)
    if told is not None and stored and told not in stored:
        raise CheckpointError(
            f"The config says {told} and the tensors are {', '.join(sorted(map(str, stored)))}",
            where=folder,
            expected="one element type",
            remedy="Choose one with --dtype",
        )
    chosen: torch.dtype | None = told if told is not None else next(iter(stored)) if len(stored) == 1 else None
    if chosen is None or chosen not in DTYPES.values():
        raise CheckpointError(
            f"The checkpoint's element types are {', '.join(sorted(map(str, stored))) or 'not of floating point'}",
            where=folder,
            expected="one of " + ", ".join(DTYPES),
            remedy="Choose one with --dtype",
        )
    return chosen


def sliding_windows(config: Any, blocks: int, where: str) -> list[int | None]:
    """The sliding window of each block, as transformers' own cache would choose it.

    Raises:
        CheckpointError: a window that cannot be.
        UnknownFamilyError: blocks that do not all attend to tokens.
    """
    with foreign("The kinds of layers cannot be told", where, "sliding_window and layer_types that agree"):
        layers = DynamicCache(config=config).layers
    known = {DynamicLayer, DynamicSlidingWindowLayer}
    if len(layers) != blocks or {type(layer) for layer in layers} - known:
        raise UnknownFamilyError(
            "The blocks do not all keep keys and values of their own",
            where=where,
            expected="attention over all tokens or over a sliding window in every block",
        )
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    if any(window is not None and window < 2 for window in windows):
        raise CheckpointError(f"sliding_window is {windows}", where=where, expected="at least 2")
    return windows
