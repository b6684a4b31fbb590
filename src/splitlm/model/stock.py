"""What a user has without us: transformers' own ``generate``, and its own modules. Only comparisons use it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from splitlm.model.load import ModelFiles


class Stock:
    """A whole model as transformers loads and runs it.

    Args:
        files: the model's directory and element type.
    """

    def __init__(self, files: ModelFiles) -> None:
        model = AutoModelForCausalLM.from_pretrained(files.folder, dtype=files.dtype, local_files_only=True).eval()
        for param in model.parameters():  # aligned like ours: an advantage for neither side
            param.data = param.data.clone(memory_format=torch.contiguous_format)
        self._model: Any = model

    def generate(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        """So many greedy tokens with a KV cache, whatever they are."""
        (made,) = self.generate_many([prompt], new_tokens)
        return made

    @torch.inference_mode()
    def generate_many(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """The same from several prompts of one length, as one batch."""
        ids = torch.tensor([list(prompt) for prompt in prompts])
        out: torch.Tensor = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
        )
        made: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return made


def stock_classifier(folder: Path) -> Any:
    """A whole classifier as transformers loads it, in fp32, ready to be trained."""
    options = {"dtype": torch.float32, "local_files_only": True}
    return AutoModelForSequenceClassification.from_pretrained(folder, **options).train()
