"""The tiny models are fit to be tested with: what goes wrong in a ring shows in their logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny import BLOCKS, BOS, CONTEXT, EOS, FAMILIES, VOCAB

TEXT = "Once upon a time, a model was cut."


@pytest.fixture(params=sorted(FAMILIES))
def folder(request: pytest.FixtureRequest, tiny: Callable[[str], Path]) -> Path:
    return tiny(request.param)


def test_greedy_output_is_varied_and_each_choice_is_clear(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids
    out = model.generate(
        ids, max_new_tokens=48, do_sample=False, output_logits=True, return_dict_in_generate=True, eos_token_id=None
    )
    new = out.sequences[0, ids.shape[1] :].tolist()
    assert len(new) == 48
    assert len(set(new)) >= 12
    top = torch.cat(out.logits).topk(2).values
    assert (top[:, 0] - top[:, 1]).median() > 0.05


def test_a_position_that_is_off_by_one_shows(folder: Path) -> None:
    """Rotary positions are relative: only a step against a cache built at other positions can differ."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = []
        for shift in (0, 1):
            cache = model(ids[:, :-1], use_cache=True)[1]
            at = torch.tensor([[ids.shape[1] - 1 + shift]])
            logits.append(model(ids[:, -1:], cache=cache, position_ids=at).logits)
    assert (logits[0] - logits[1]).abs().max() > 0.02


def test_config_and_files_are_those_of_a_real_model(folder: Path) -> None:
    from transformers import AutoConfig, PreTrainedTokenizerFast

    config = AutoConfig.from_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    assert raw["dtype"] == "float32"
    assert (config.vocab_size, config.num_hidden_layers, config.max_position_embeddings) == (VOCAB, BLOCKS, CONTEXT)
    assert (config.bos_token_id, config.eos_token_id) == (BOS, EOS)
    assert {"model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= {path.name for path in folder.iterdir()}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)  # AutoTokenizer would give Qwen2 its own splitting
    ids = tokenizer(TEXT + "\nÉé")["input_ids"]
    assert ids[0] == BOS == tokenizer.bos_token_id and tokenizer.eos_token_id == EOS
    assert len(ids) == 1 + len(TEXT) + 3
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT + "\né"
    assert len(tokenizer) == VOCAB


def test_a_model_is_the_same_every_time(tmp_path: Path, tiny: Callable[[str], Path]) -> None:
    from tests.tiny import build

    again = build("llama", tmp_path)
    assert (again / "model.safetensors").read_bytes() == (tiny("llama") / "model.safetensors").read_bytes()
