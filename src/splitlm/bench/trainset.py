"""What the figures of training are trained on: a seeded BERT classifier, and rows that all have the same length."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from splitlm.model import toy_classifier

WORDS, CLASSES, HEADS = 500, 4, 4


@dataclass(frozen=True)
class Size:
    """How large a training is.

    Attributes:
        hidden: width of the model, a multiple of four heads.
        blocks: of the model.
        batch: rows per microbatch.
        length: tokens per row.
        microbatches: of a window.
        windows: of a round, which is one turn.
    """

    hidden: int = 256
    blocks: int = 12
    batch: int = 8
    length: int = 64
    microbatches: int = 16
    windows: int = 1

    @property
    def tensor_bytes(self) -> int:
        """Of the hidden states of one microbatch, fp32."""
        return 4 * self.batch * self.length * self.hidden

    @property
    def rows(self) -> int:
        """Of a round."""
        return self.batch * self.microbatches * self.windows


def build(folder: Path, size: Size) -> Path:
    """Save the model, its tokenizer (one token per word) and ``train.jsonl`` under ``folder``; return it.

    There is no dropout.
    """
    words = [f"w{i}" for i in range(WORDS)]
    toy_classifier.build(
        folder, words, hidden=size.hidden, blocks=size.blocks, heads=HEADS, length=size.length, classes=CLASSES
    )
    drawn = torch.randint(WORDS, (size.rows, size.length), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [{"text": " ".join(f"w{i}" for i in row), "label": row[0] % CLASSES} for row in drawn]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def settings(
    folder: Path, size: Size, shape: str, cut: tuple[int, int], workers: int = 1, **more: Any
) -> dict[str, Any]:
    """A run's configuration as a mapping.

    Args:
        folder: what ``build`` made.
        size: of the training.
        shape: its name.
        cut: ``cut-layers`` and ``tail-blocks``.
        workers: how many.
        more: keys of ``learning.u-shape``, with ``_`` for ``-``.
    """
    return {
        "name": "bench",
        "server": {
            "architecture": shape,
            "clients": [1, workers],
            "cut-layers": cut[0],
            "tail-blocks": cut[1],
            "model-path": str(folder),
            "data-path": str(folder / "train.jsonl"),
            "validation": False,
            "parameters": {"load": True, "save": False},
        },
        "learning": {
            "learning-rate": 1e-4,
            "batch-size": size.batch,
            "control-count": size.microbatches,
            "u-shape": {
                "microbatches-per-window": size.microbatches,
                "max-inflight": 4,
                **{key.replace("_", "-"): value for key, value in more.items()},
            },
        },
    }
