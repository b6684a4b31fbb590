"""What a recipe refuses before any weights are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitlm.core.config import read
from splitlm.core.errors import UsageError
from splitlm.finetune.recipe import open_recipe
from tests.tiny_tune import CLASSES, build


def test_modules_that_the_model_has_not_are_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    model = build("llama", tmp_path)
    server = {"model-name": str(model), "model-path": str(model), "tail-blocks": 1}
    config = read({"server": server, "fine-tune": {"name": "LoRA"}})
    assert open_recipe(config, model, CLASSES).lora is not None
    monkeypatch.setitem(KNOWN, "llama", ["q_proj", "elsewhere"])
    with pytest.raises(UsageError, match=r"llama.*'elsewhere'"):
        open_recipe(config, model, CLASSES)
    assert open_recipe(read({"server": server}), model, CLASSES).lora is None
