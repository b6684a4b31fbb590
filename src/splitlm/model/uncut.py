"""The whole model in one process: the reference of every parity test, and what a ring is compared with.

With ``loader="hf"`` nothing of ours but the loop takes part: transformers loads, computes and caches. With ``shard``
the same loop runs our own loader, stage and cache over all blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from splitlm.core.cut import make_cut
from splitlm.core.sampling import Sampling
from splitlm.model.load import Loader, ModelFiles
from splitlm.model.runner import out_of_memory
from splitlm.model.sampling import Sampler
from splitlm.model.stage import Stage, build_stages
from splitlm.model.whole import own_memory, whole_model

Step = Callable[[Sequence[int], int], torch.Tensor | None]
"""``step(rows, position)`` gives the last row's logits, as every segment with the head does."""


class Uncut:
    """A model that was not cut.

    Args:
        files: the model's directory.
        loader: ``hf`` for transformers alone, ``shard`` for our stage over all blocks.
        model: a causal model of transformers to be used as it is; then nothing is loaded.
        stage: one over all blocks, to be used as it is; then nothing is loaded.
    """

    def __init__(
        self, files: ModelFiles, *, loader: Loader = "hf", model: Any = None, stage: Stage | None = None
    ) -> None:
        self._files = files
        self._session = 0
        self._stage = stage
        self._model: Any = model
        if stage is not None:
            return
        if model is None and loader == "shard":
            (self._stage,) = build_stages(files, make_cut(files.blocks, ()).segments)
            return
        if model is None:
            self._model = model = whole_model(files.folder, files.dtype)
            own_memory(model)
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    @torch.inference_mode()
    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        prefill_chunk: int,
        sampling: Sampling | None = None,
        eos_ids: frozenset[int] = frozenset(),
        forced: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Tokens one by one, each with the logits ``[vocab]`` it was chosen from.

        Args:
            prefill_chunk: rows per prefill step; sums depend on it, so both sides of a comparison use the same.
            forced: feed these tokens instead of the chosen ones (teacher forcing).

        Raises:
            ModelError: the logits are not finite.
            SplitlmError: memory ran out.
        """
        sampler = Sampler(sampling or Sampling(), prompt)
        step = self._begin()
        position, logits = 0, None
        for begin in range(0, len(prompt), prefill_chunk):
            rows = prompt[begin : begin + prefill_chunk]
            logits = _worded(step, rows, position)
            position += len(rows)
        for i in range(max_new_tokens):
            if logits is None:
                return
            token = sampler.next(logits)
            yield token, logits
            token = forced[i] if forced is not None and i < len(forced) else token
            if token in eos_ids or i + 1 == max_new_tokens or position >= self._files.context:
                return
            logits = _worded(step, [token], position)
            position += 1

    def _begin(self) -> Step:
        if self._stage is not None:
            stage, self._session = self._stage, self._session + 1
            session = self._session
            stage.close(session - 1)
            stage.open(session)
            return lambda rows, at: stage.forward(session, torch.tensor([list(rows)]), at, logits=True)
        cache = DynamicCache(config=self._model.config)

        def step(rows: Sequence[int], at: int) -> torch.Tensor:
            given = {self._cache_name: cache, "position_ids": torch.arange(at, at + len(rows)).unsqueeze(0)}
            out: torch.Tensor = self._model(
                torch.tensor([list(rows)]), use_cache=True, logits_to_keep=1, **given
            ).logits
            return out[0, -1]

        return step


def _worded(step: Step, rows: Sequence[int], at: int) -> torch.Tensor | None:
    """One step; memory that runs out is said in words."""
    try:
        return step(rows, at)
    except (MemoryError, RuntimeError) as error:
        told = out_of_memory(error, "The uncut model")
        if told is None:
            raise
        raise told from error
