"""Arms that train without a cut, and one that measures what each party's part of a cut takes."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from splitlm.core.config import read
from splitlm.finetune.batch import Microbatch
from splitlm.finetune.recipe import OwnerData, open_recipe, read_rows
from splitlm.model.stock import stock_classifier
from splitlm.model.tuned import TunedPart
from splitlm.model.uncut_train import UncutTrainer


class Rounds:
    """The microbatches of each turn; the same that an owner of a run would have.

    Args:
        config: of the run, as a mapping.
        threads: intra-op threads of this process from now on.
    """

    def __init__(self, config: dict[str, Any], threads: int) -> None:
        torch.set_num_threads(threads)
        self.config = read(config, "the bench's settings")
        rows = read_rows(self.config, "train")
        self.folder = Path(self.config.server.model_path or "")
        self.recipe = open_recipe(self.config, self.folder, rows.num_labels)
        self._data = OwnerData(self.recipe, 0, rows, None)
        self.round = -1

    def batches(self) -> list[Microbatch]:
        """Those of the next round."""
        self.round += 1
        return self._data.round(self.round)

    def windows(self) -> list[list[Microbatch]]:
        """The same, by window."""
        batches = self.batches()
        most = self.config.learning.u_shape.microbatches_per_window
        return [batches[at : at + most] for at in range(0, len(batches), most)]


class UncutTrainWork:
    """Our uncut loop (``model/uncut_train``).

    Args:
        config: of the run it stands beside, as a mapping.
        threads: intra-op threads.
    """

    def __init__(self, *, config: dict[str, Any], threads: int) -> None:
        self._rounds = Rounds(config, threads)
        recipe = self._rounds.recipe
        self._trainer = UncutTrainer(
            recipe.files,
            recipe.shape,
            recipe.segments,
            recipe.goal,
            recipe.how,
            seed=self._rounds.config.server.random_seed,
        )
        self.told: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """One round."""
        begin = time.perf_counter()
        windows = self._rounds.windows()
        for number, batches in enumerate(windows):
            self._trainer.window(self._rounds.round, number, {0: batches})
        return {"rows": sum(b.samples for w in windows for b in w), "seconds": time.perf_counter() - begin}

    def close(self) -> None:
        """Nothing to do."""


class PlainTrainWork:
    """The loop that a user of transformers writes: accumulate gradients over a window's microbatches, step AdamW.

    Args:
        config: of the run it stands beside, as a mapping.
        threads: intra-op threads.
    """

    def __init__(self, *, config: dict[str, Any], threads: int) -> None:
        self._rounds = Rounds(config, threads)
        self._model: Any = stock_classifier(self._rounds.folder)
        learning = self._rounds.config.learning
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=learning.learning_rate, weight_decay=learning.weight_decay
        )
        self.told: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """One round."""
        begin = time.perf_counter()
        windows = self._rounds.windows()
        for batches in windows:
            for batch in batches:
                out = self._model(input_ids=batch.ids, attention_mask=batch.mask.to(torch.int64), labels=batch.labels)
                (out.loss / len(batches)).backward()
                out.loss.item()
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return {"rows": sum(b.samples for w in windows for b in w), "seconds": time.perf_counter() - begin}

    def close(self) -> None:
        """Nothing to do."""


class SharesWork:
    """Forward and backward of one microbatch, part by part, on one thread; in its CPU time, whatever else runs here.

    Args:
        config: of the run, as a mapping; each turn has a cut of its own.
    """

    def __init__(self, *, config: dict[str, Any]) -> None:
        self._config = config
        self.told: dict[str, Any] = {}

    def run(self, *, cut_layers: int, tail_blocks: int, repetitions: int) -> dict[str, Any]:
        """Median seconds of the owner's and of the worker's parts."""
        server = {**self._config["server"], "cut-layers": cut_layers, "tail-blocks": tail_blocks}
        rounds = Rounds({**self._config, "server": server}, 1)
        recipe = rounds.recipe
        parts = [TunedPart(part, recipe.files) for part in recipe.files.load(list(recipe.segments))]
        batch = rounds.windows()[0][0]
        times: dict[str, list[float]] = {"owner": [], "worker": []}
        for _ in range(1 + repetitions):
            took = self._once(parts, batch, recipe.goal)
            for role in times:
                times[role].append(sum(s for s, place in zip(took, recipe.shape.places, strict=True) if place == role))
        return {role: median(values[1:]) for role, values in times.items()}

    @staticmethod
    def _once(parts: list[TunedPart], batch: Any, goal: Any) -> list[float]:
        took, hidden, key = [0.0] * len(parts), batch.ids, (0, 0)
        for i, part in enumerate(parts[:-1]):
            begin = time.thread_time()
            hidden = part.forward(key, hidden, batch.mask)
            took[i] += time.thread_time() - begin
        begin = time.thread_time()
        parts[-1].score(key, hidden, batch.mask, batch.labels, goal, 1.0)
        gradient = parts[-1].backward(key)
        took[-1] += time.thread_time() - begin
        for i in reversed(range(len(parts) - 1)):
            begin = time.thread_time()
            gradient = parts[i].backward(key, gradient)
            took[i] += time.thread_time() - begin
        return took

    def close(self) -> None:
        """Nothing to do."""
