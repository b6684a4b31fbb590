"""A model of a few thousand parameters with seeded weights, for figures whose compute is simulated anyway."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from splitlm.model.generator import draws_apart
from splitlm.model.quiet import no_bars

VOCAB = 64
BLOCKS = 6
HIDDEN = 64
CONTEXT = 512


def build(folder: Path, blocks: int = BLOCKS) -> Path:
    """Save the model and its tokenizer (one token per character) under ``folder``, and return it."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    with draws_apart(1), no_bars():
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    words = ["<unk>", "<s>", "</s>", *(chr(0x20 + i) for i in range(VOCAB - 3))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder
