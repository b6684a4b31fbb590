"""What the figures of training are trained on: a seeded BERT classifier, and rows that all have the same length."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from splitlm.model.quiet import no_bars

WORDS, CLASSES, HEADS = 500, 4, 4
SPECIAL = ("[PAD]", "[UNK]")


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
    windows: int = 2

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

    There is no dropout: drawing random numbers takes one thread, which would slow the side that has two.
    """
    config = AutoConfig.for_model(
        "bert",
        vocab_size=WORDS + len(SPECIAL),
        hidden_size=size.hidden,
        intermediate_size=4 * size.hidden,
        num_hidden_layers=size.blocks,
        num_attention_heads=HEADS,
        max_position_embeddings=size.length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
    )
    with torch.random.fork_rng(devices=[]), no_bars():
        torch.manual_seed(1)
        AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)
        drawn = torch.randint(WORDS, (size.rows, size.length)).tolist()
    words = [*SPECIAL, *(f"w{i}" for i in range(WORDS))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(folder)
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
