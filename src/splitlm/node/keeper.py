"""What the coordinator keeps of a run: its folder, each round's model, and the manifest that makes a round whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from splitlm.coordinator.members import Who
from splitlm.coordinator.orders import stored_name
from splitlm.core import training
from splitlm.core.config import RunConfig, resolved
from splitlm.core.errors import ProtocolError
from splitlm.core.shape import Role
from splitlm.finetune.manifest import File
from splitlm.finetune.output import ADAPTER, MODEL, write_outputs
from splitlm.finetune.partyfile import files_of
from splitlm.finetune.recipe import Recipe, Resolve, model_folder, open_recipe
from splitlm.finetune.store import Identity, RunFolder
from splitlm.model.checkpoint import check_place, unwritable
from splitlm.model.runner import Runner
from splitlm.telemetry.folder import LIBRARIES, versions

_log = logging.getLogger("splitlm.train")
FREE = frozenset(("server.global-round", "server.aggregator", "log_path", "debug_mode", "name"))
"""Settings that may be others when a run is gone on with."""


@dataclass(frozen=True)
class Begun:
    """Where a run begins.

    Attributes:
        folder: of the run, open; None keeps nothing.
        resume: the last complete round, or −1.
        stored: of that round: each party's files, by ``stored_name``.
    """

    folder: RunFolder | None = None
    resume: int = -1
    stored: Mapping[str, list[training.SavedFile]] = field(default_factory=dict)


def begin(config: RunConfig, resolve: Resolve, path: Path | None, *, resume: bool = False) -> Begun:
    """Make a run's folder, or take up an earlier run's.

    Args:
        config: the run's settings.
        resolve: finds a model's directory.
        path: of the folder; None keeps nothing.
        resume: whether a run lies there that is to be gone on with, from its last complete round.

    Raises:
        UsageError: another run lies there, or none that could be gone on with, or files where its model is to be.
        CheckpointError: the run is of another model, cut, number of parties or rank of adapters, or its rounds are
            damaged, all of them.
        SplitlmError: the folder cannot be written, or the model cannot be opened.
    """
    if path is None:
        return Begun()
    recipe = open_recipe(config, model_folder(config, resolve), 0)
    folder = RunFolder(path, identity(recipe))
    if not resume:
        _check_output(recipe, path, 0)
        folder.create(resolved(config), versions((*LIBRARIES, "peft")))
        return Begun(folder)
    earlier = folder.reopen()
    try:
        for name, was, now in _differences(earlier, resolved(config)):
            _log.warning("%s is %s, and was %s when the run began", name, now, was)
        latest = folder.latest()
        _check_output(recipe, path, latest + 1 if latest is not None else 0)
        folder.tidy()
        if latest is None:
            _log.warning("No round of the run in %s was completed: it begins anew", path)
            return Begun(folder)
        manifest = folder.manifest(latest)
        stored = {
            party: [training.SavedFile(name, *_plain(manifest.files[name])) for name in files_of(party)]
            for party in manifest.parties
        }
    except BaseException:
        folder.close()
        raise
    return Begun(folder, latest, stored)


def _check_output(recipe: Recipe, path: Path, first: int) -> None:
    """Make sure, before a round is computed, that its model will find a place.

    Raises:
        UsageError: there is something else.
        ModelError: it cannot be looked into.
    """
    server, place = recipe.config.server, path / (MODEL if recipe.lora is None else ADAPTER)
    if server.parameters.save and first < server.global_round:
        try:
            check_place(place)
        except OSError as error:
            raise unwritable(place, error) from error


def identity(recipe: Recipe) -> Identity:
    """What checkpoints of a run belong to."""
    index, lora = recipe.files.index, recipe.lora
    return Identity(
        model=index.config_hash(),
        cut=recipe.segments,
        weights=index.fingerprint() if index.entries else "",
        owners=recipe.config.server.owners,
        workers=recipe.config.server.workers,
        rank=lora.r if lora is not None else 0,
    )


class Keeper:
    """Writes the model of each round, and then makes the round whole.

    Args:
        config: the run's settings.
        resolve: finds a model's directory.
        folder: of the run; None keeps nothing.
        runner: a thread that may wait for the disk.
        say: takes one line of progress.
    """

    def __init__(
        self, config: RunConfig, resolve: Resolve, folder: RunFolder | None, runner: Runner, say: Callable[[str], None]
    ) -> None:
        self._config, self._resolve, self._folder, self._runner, self._say = config, resolve, folder, runner, say
        self._recipe: Recipe | None = None
        self._homeless = False
        self.classes = 0

    async def keep(
        self, round_: int, states: dict[Role, dict[str, torch.Tensor]], saved: dict[Who, training.Saved]
    ) -> None:
        """Everyone has these averages, and has written what it needs to go on.

        Raises:
            SplitlmError: it cannot be written; earlier rounds are as they were.
            ProtocolError: a party reports files that are not its own.
        """
        if self._folder is None or not self._config.server.parameters.save:
            return
        await self._runner.run(self._write, self._folder, states)
        await self.whole(round_, saved)

    async def whole(self, round_: int, saved: dict[Who, training.Saved]) -> None:
        """The model of a round is written, here or where it was averaged, and everyone's files are.

        Raises:
            SplitlmError: it cannot be written; earlier rounds are as they were.
            ProtocolError: a party reports files that are not its own.
        """
        if self._folder is None or not self._config.server.parameters.save:
            return
        files: dict[str, File] = {}
        for who, told in saved.items():
            if {file.name for file in told.files} not in (set(files_of(stored_name(who))), set()):
                raise ProtocolError(
                    f"{who[0]} {who[1]} reports the files {[file.name for file in told.files]}",
                    expected=" and ".join(files_of(stored_name(who))),
                )
            files |= {file.name: File(file.nbytes, file.digest) for file in told.files}
        if all(told.files for told in saved.values()):
            await self._runner.run(self._folder.complete, round_, [stored_name(who) for who in saved], files)
        elif not self._homeless:
            self._homeless = True
            names = ", ".join(f"{who[0]} {who[1]}" for who, told in sorted(saved.items()) if not told.files)
            self._say(f"the run cannot be resumed: {names} keeps no files, for want of a --folder")

    def _write(self, folder: RunFolder, states: dict[Role, dict[str, torch.Tensor]]) -> None:
        if self._recipe is None:
            self._recipe = open_recipe(self._config, model_folder(self._config, self._resolve), self.classes)
        trained = {name: tensor for state in states.values() for name, tensor in state.items()}
        write_outputs(folder.path, self._recipe, trained)


def _plain(file: File) -> tuple[int, str]:
    return file.bytes, file.sha256


def _differences(earlier: Any, now: Any, at: str = "") -> list[tuple[str, Any, Any]]:
    """Settings that are others now, by their dotted names."""
    if isinstance(earlier, dict) and isinstance(now, dict):
        found = []
        for key in sorted(earlier.keys() | now.keys(), key=str):
            found += _differences(earlier.get(key), now.get(key), f"{at}.{key}" if at else str(key))
        return found
    if at in FREE or _builtin(earlier) == _builtin(now):
        return []
    return [(at, earlier, now)]


def _builtin(value: Any) -> Any:
    return [_builtin(inner) for inner in value] if isinstance(value, list | tuple) else value
