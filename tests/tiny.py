"""Small seeded models of every family, made on the spot: five blocks, grouped heads, a vocabulary of 128 characters.

The usual initial weights (std 0.02) give flat logits and one repeated token, under which a wrong mask or position does
not show. These weights are larger, and norms and biases are not at their neutral values; tests/test_tiny.py checks that
it shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

VOCAB = 128
CONTEXT = 128
HIDDEN = 64
BLOCKS = 5
UNK, BOS, EOS = 0, 1, 2
WINDOW = 8

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
COMMON: Mapping[str, object] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HIDDEN // 4,
    "max_position_embeddings": CONTEXT,
    "rope_parameters": ROPE,
}
GEMMA3_LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
GEMMA2_LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "llama": ("llama", {**COMMON, "tie_word_embeddings": True}),
    "llama-untied": ("llama", {**COMMON, "tie_word_embeddings": False}),
    "gpt2": ("gpt2", {"n_embd": HIDDEN, "n_layer": BLOCKS, "n_head": 4, "n_positions": CONTEXT}),
    "gemma2": (
        "gemma2",
        {**COMMON, "sliding_window": WINDOW, "layer_types": GEMMA2_LAYERS, "query_pre_attn_scalar": HIDDEN // 4},
    ),
    "gemma3": (
        "gemma3_text",
        {
            **COMMON,
            "sliding_window": WINDOW,
            "layer_types": GEMMA3_LAYERS,
            "query_pre_attn_scalar": HIDDEN // 4,
            "rope_parameters": {
                "sliding_attention": ROPE,
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            },
        },
    ),
    "qwen2": ("qwen2", {**COMMON, "tie_word_embeddings": False}),
    "qwen2.5": ("qwen2", {**COMMON, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**COMMON, "tie_word_embeddings": True}),
    "mistral": ("mistral", {**COMMON, "sliding_window": WINDOW}),
    "mistral-full": ("mistral", {**COMMON, "sliding_window": None}),
}


def build(family: str, folder: Path) -> Path:
    """Save the model and its tokenizer under ``folder`` and return it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, options = FAMILIES[family]
    config = AutoConfig.for_model(
        kind, **options, vocab_size=VOCAB, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=None, initializer_range=0.2
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sorted(FAMILIES).index(family) + 1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
            if kind.startswith("gemma"):  # which scales its embedding by the square root of its width
                model.get_input_embeddings().weight.mul_(HIDDEN**-0.5)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> object:
    """One token per character; begins with ``<s>``; characters it does not have become ``<unk>``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    characters = [*map(chr, range(0x20, 0x7F)), "\n", *"äöüßéèêàçñøåæœñ–—“”‘’…€£°µ½×÷←→↑"]
    words = list(dict.fromkeys(["<unk>", "<s>", "</s>", *characters]))[:VOCAB]
    if len(words) != VOCAB:
        raise ValueError(f"{len(words)} tokens for a vocabulary of {VOCAB}")
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
