"""A BERT classifier of any size with seeded weights and one token per word, for the figures of training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from splitlm.model.generator import draws_apart
from splitlm.model.quiet import no_bars

SPECIAL = ("[PAD]", "[UNK]")


def build(
    folder: Path, words: Sequence[str], *, hidden: int, blocks: int, heads: int, length: int, classes: int
) -> Path:
    """Save the model and its tokenizer under ``folder``, and return it.

    There is no dropout: drawing random numbers takes one thread, which would slow a side that has two.

    Args:
        folder: where to.
        words: of the vocabulary, beside ``SPECIAL``.
        hidden: width.
        blocks: how many.
        heads: of attention.
        length: most tokens of a text.
        classes: of the head.
    """
    config = AutoConfig.for_model(
        "bert",
        vocab_size=len(words) + len(SPECIAL),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=classes,
    )
    with draws_apart(1), no_bars():
        AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)
    vocabulary = {word: i for i, word in enumerate((*SPECIAL, *words))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(folder)
    return folder
