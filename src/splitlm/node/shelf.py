"""What a party stores of each round, and takes up again when a run is gone on with.

Of random numbers and of the order of rows nothing needs to be stored: they follow from the seed, the round and the
window (``model.seeding``, ``finetune.batches``), and a run is gone on with at the beginning of a round.
"""

from __future__ import annotations

import logging
from pathlib import Path

from splitlm.coordinator.orders import stored_name
from splitlm.core import training
from splitlm.core.errors import CheckpointError, ModelError
from splitlm.finetune.manifest import File
from splitlm.finetune.party import Party
from splitlm.finetune.partyfile import ROWS, PartyFolder
from splitlm.finetune.partyfile import Party as Stored
from splitlm.finetune.recipe import Recipe
from splitlm.model.tuned import load_into

_log = logging.getLogger("splitlm.train")


class Shelf:
    """One party's rounds on its disk. All of it runs on the compute thread.

    Args:
        recipe: the run's.
        party: what is stored.
        start: the party's place in the run, and what it goes on from.
        folder: where; None stores nothing.
        mark: of an owner's rows.
    """

    def __init__(
        self, recipe: Recipe, party: Party, start: training.Start, folder: Path | None, mark: str = ""
    ) -> None:
        self._mark = mark
        self._party, self._start = party, start
        self._name = stored_name((party.role, party.number))
        keeps = folder is not None and recipe.config.server.parameters.save
        self._folder = PartyFolder(folder, self._name) if folder is not None else None
        self._keeps = keeps
        self._alike = party.role == "worker" and recipe.config.learning.body_sync == "window"

    def save(self, round_: int) -> list[training.SavedFile]:
        """Write the party as it is after a round; what was written.

        Raises:
            SplitlmError: it cannot be written.
        """
        if not self._keeps or self._folder is None:
            return []
        optimizer = self._party.optimizer
        stored = Stored(
            tensors={name: parameter.detach() for name, parameter in self._party.parameters.items()},
            optimizer=optimizer.state_dict() if optimizer is not None else None,
            cursor={"round": round_ + 1},
            extra={ROWS: self._mark} if self._mark else {},
        )
        files = self._folder.save(round_, stored)
        return [training.SavedFile(name, file.bytes, file.sha256) for name, file in sorted(files.items())]

    def resume(self) -> None:
        """Take up the round that the run goes on from, if it goes on from one.

        A party that had no part in it takes the weights of another one of its role, which are the same at a round's
        end, and that one's optimizer only where the role's replicas are one.

        Raises:
            CheckpointError: the files are not here, not as they were written, or of another model.
        """
        start, own = self._start, self._start.stored == self._name
        if start.resume < 0:
            return
        if self._folder is None:
            raise CheckpointError(
                f"{self._party.name} has no folder to go on from",
                where=f"round {start.resume}",
                expected="the folder in which it stored the round",
            )
        files = {file.name: File(file.nbytes, file.digest) for file in start.files}
        stored = self._folder.load(start.resume, files, start.stored)
        if own and stored.extra.get(ROWS, self._mark) != self._mark:
            _log.warning("The rows of %s are others than those that round %d was stored with", self._name, start.resume)
        try:
            load_into(self._party.parameters, stored.tensors)
            if self._party.optimizer is not None and isinstance(stored.optimizer, dict) and (own or self._alike):
                self._party.optimizer.load_state_dict(stored.optimizer)
        except (ModelError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"The state of {start.stored} does not fit {self._party.name}: {str(error).rstrip('. ')}",
                where=f"round {start.resume}",
                expected="the model, cut and adapters that the run began with",
            ) from error
