"""Adapters on every family."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitlm.model.family import FAMILIES
from splitlm.model.lora import Lora, check_targets, targets_for
from splitlm.model.tunable import TunableFiles
from tests.tiny_tune import BLOCKS, DECODER, VOCAB

TYPES = sorted(kind for family in FAMILIES for kind in family.model_types)


@pytest.mark.parametrize("kind", TYPES)
def test_every_family_says_what_its_adapters_change(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    common = {**DECODER, "head_dim": 8} if kind != "gpt2" else {"n_embd": 32, "n_layer": BLOCKS, "n_head": 4}
    config = AutoConfig.for_model(kind, **common, vocab_size=VOCAB, pad_token_id=0)
    config.architectures = ["BertForSequenceClassification"] if kind == "bert" else None
    config.save_pretrained(tmp_path)
    files = TunableFiles(tmp_path, scratch=True)
    check_targets(Lora(), files)
    check_targets(Lora(targets=files.family.lora), files)  # the row is right where peft has names too
    assert targets_for(Lora(), "unheard-of", files.family) == tuple(sorted(files.family.lora))
    assert targets_for(Lora(targets=("b", "a")), kind, files.family) == ("a", "b")
