"""The evaluation of each round's average where it is taken, on rows that lie on that machine."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from splitlm.core.config import RunConfig
from splitlm.core.errors import DataMissingError
from splitlm.core.shape import Role
from splitlm.finetune.compute import Runs
from splitlm.finetune.data import Rows
from splitlm.finetune.evaluate import evaluate
from splitlm.finetune.objective import Objectives
from splitlm.finetune.recipe import Recipe, Resolve, model_folder, open_recipe, read_rows

SPLITS = ("test", "validation")
"""The first of them that there is."""
_log = logging.getLogger("splitlm.train")


class Central:
    """Evaluates, where the run asks for validation and the rows are here; otherwise it finds nothing.

    Args:
        config: the run's settings.
        resolve: finds a model's directory.
        runner: the thread that computes.
        objectives: the table to look in; None for ours.
    """

    def __init__(self, config: RunConfig, resolve: Resolve, runner: Runs, objectives: Objectives | None = None) -> None:
        self._config, self._resolve, self._runner, self._objectives = config, resolve, runner, objectives
        self._rows: Rows | None = None
        self._recipe: Recipe | None = None

    async def open(self) -> None:
        """Read the rows, so that what is wrong with them is known before the run.

        Raises:
            UsageError: they are not as they should be.
        """
        if self._config.server.validation:
            self._rows = await self._runner.run(self._read)

    async def evaluate(self, classes: int, states: Mapping[Role, Mapping[str, torch.Tensor]]) -> dict[str, float]:
        """What the model of these states is worth, see ``finetune.evaluate``; nothing without rows.

        Args:
            classes: of a classifier's head; 0 keeps the model's own.
            states: the averages of each role.

        Raises:
            SplitlmError: as ``finetune.evaluate.evaluate``.
        """
        rows = self._rows
        if rows is None:
            return {}
        if self._recipe is None:
            self._recipe = await self._runner.run(self._open, classes)
        trained = {name: tensor for state in states.values() for name, tensor in state.items()}
        steps = evaluate(self._recipe, rows, trained, answers=self._config.server.evaluation_answers)
        found: dict[str, float] | None = None
        while found is None:  # step by step: between two of them the run can be stopped
            found = await self._runner.run(next, steps)
        return found

    def _open(self, classes: int) -> Recipe:
        folder = model_folder(self._config, self._resolve)
        return open_recipe(self._config, folder, classes, objectives=self._objectives)

    def _read(self) -> Rows | None:
        missing: DataMissingError | None = None
        for split in SPLITS:
            try:
                return read_rows(self._config, split)
            except DataMissingError as error:
                missing = missing or error
        if self._config.shape.labels_travel:  # where labels stay with their owners, rows are not expected here
            _log.warning("There is no central evaluation, for want of rows: %s", missing)
        return None
