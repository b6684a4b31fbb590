"""Small seeded models with dropout for training tests, and microbatches for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

VOCAB, CLASSES, BLOCKS, HIDDEN = 96, 4, 4, 32

FAMILIES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "bert": (
        "bert",
        {
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": BLOCKS,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "num_labels": CLASSES,
        },
    ),
    "gpt2": ("gpt2", {"n_embd": HIDDEN, "n_layer": BLOCKS, "n_head": 4, "n_positions": 64}),
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True, "head_dim": 8}),
    "starcoder2": ("starcoder2", {"tie_word_embeddings": True}),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": 6,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
}
DECODER: Mapping[str, object] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
DROPOUTS = {
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "starcoder2": ("residual_dropout", "embedding_dropout", "attention_dropout"),
}


def build(family: str, folder: Path, dropout: float = 0.0) -> Path:
    """Save the model under ``folder`` and return it."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    kind, options = FAMILIES[family]
    common = DECODER if kind not in ("bert", "gpt2") else {}
    rates = dict.fromkeys(DROPOUTS.get(kind, ("attention_dropout",)), dropout)
    config = AutoConfig.for_model(kind, **{**common, **options, **rates}, vocab_size=VOCAB, initializer_range=0.1)
    auto = AutoModelForSequenceClassification if kind == "bert" else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(family))
        auto.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Batch:
    """See ``finetune.batch.Microbatch``."""

    ids: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor
    weight: int


def batches(count: int, *, classify: bool, seed: int, rows: int = 3, longest: int = 9) -> list[Batch]:
    """Microbatches of rows of unequal lengths."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        lengths = torch.randint(2, longest + 1, (rows,), generator=generator)
        width = int(lengths.max())
        mask = (torch.arange(width)[None] < lengths[:, None]).to(torch.uint8)
        ids = torch.randint(3, VOCAB, (rows, width), generator=generator) * mask
        if classify:
            labels = torch.randint(0, CLASSES, (rows,), generator=generator)
            made.append(Batch(ids, mask, labels, rows))
        else:
            labels = torch.where(mask.bool(), ids, -100)
            made.append(Batch(ids, mask, labels, int((labels[:, 1:] != -100).sum())))
    return made
