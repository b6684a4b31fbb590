"""From a run's settings to what a party computes with: its parts of the model, its optimizer, its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from splitlm.core.config import RunConfig
from splitlm.core.cut import Segment
from splitlm.core.shape import Role, Shape, cut_for
from splitlm.finetune.batch import Example, Microbatch
from splitlm.finetune.data import Rows, distribute, encode, load_rows, microbatches
from splitlm.finetune.objective import Objective, Objectives, objective_for
from splitlm.finetune.party import Party
from splitlm.model.compute.paced_part import PacedPart
from splitlm.model.lora import Lora, check_targets
from splitlm.model.seeding import Seeding
from splitlm.model.stepping import Stepping
from splitlm.model.text import TextCodec
from splitlm.model.tunable import TunableFiles
from splitlm.model.tuned import TunedPart, tie

HUB = {"bert": "bert-base-cased", "gpt2": "gpt2", "llama": "meta-llama/Llama-3.2-1B"}
"""What the three names of ``server.model-name`` mean."""
Resolve = Callable[[str, bool], Path]
"""The directory of a model by its name; whether its weights are wanted too."""


@dataclass(frozen=True)
class Recipe:
    """A run's model and method, the same for all its parties.

    Attributes:
        config: the run's settings.
        files: the model's directory, opened.
        shape: the row of the table.
        segments: of each part.
        goal: what is minimised.
    """

    config: RunConfig
    files: TunableFiles
    shape: Shape
    segments: tuple[Segment, ...]
    goal: Objective

    @property
    def lora(self) -> Lora | None:
        """The adapters, or None where all weights are trained."""
        tune = self.config.fine_tune
        return Lora(tune.lora.r, tune.lora.alpha) if tune.name == "LoRA" else None

    @property
    def how(self) -> Stepping:
        """The optimizer of every party."""
        learning = self.config.learning
        return Stepping(
            learning_rate=learning.learning_rate,
            weight_decay=learning.weight_decay,
            clip_grad_norm=learning.clip_grad_norm,
        )

    @property
    def frozen_embedding(self) -> bool:
        """Whether embeddings stay as they are, see ``RunConfig``."""
        return self.config.frozen_embedding

    def party(self, role: Role, number: int, device: torch.device | None = None, pace_ms: float = 0.0) -> Party:
        """Build one party; its weights are read.

        Args:
            role: of the party.
            number: among those of its role.
            device: that computes; by default the CPU.
            pace_ms: least time of a forward or a backward, for a simulated device; 0 for a real one.

        Raises:
            ModelError: the model cannot be loaded. Otherwise as ``ModelFiles.load``.
        """
        at = self.shape.parts_of(role)
        seeding = Seeding(self.config.server.random_seed)
        make = partial(PacedPart, pace_ms=pace_ms) if pace_ms else TunedPart
        parts = {
            i: make(part, self.files, seeding=seeding, lora=self.lora, frozen_embedding=self.frozen_embedding)
            for i, part in zip(at, self.files.load([self.segments[i] for i in at]), strict=True)
        }
        if device is not None:
            tie(list(parts.values()))  # a table that two parts share goes there once
            for part in parts.values():
                part.part.module.to(device)
        return Party(self.shape, role, number, parts, self.goal, self.how, seeding)


def model_folder(config: RunConfig, resolve: Resolve) -> Path:
    """Where the run's model lies on this machine.

    Raises:
        ModelMissingError: it is not here, and cannot be fetched.
    """
    server = config.server
    if server.model_path is not None:
        return resolve(server.model_path, server.parameters.load)
    return resolve(HUB.get(server.model_name.lower(), server.model_name), server.parameters.load)


def open_recipe(
    config: RunConfig,
    folder: Path,
    classes: int,
    *,
    objectives: Objectives | None = None,
    dtype: str = "float32",
) -> Recipe:
    """Open a run's model; no weights are read yet.

    Args:
        config: the run's settings.
        folder: of the model.
        classes: of a classifier's head; 0 keeps the model's own.
        objectives: the table to look in.
        dtype: of weights and arithmetic.

    Raises:
        CutError: the cut does not fit the model.
        UsageError: the model has not the modules that LoRA adapts. Otherwise as ``TunableFiles``.
    """
    files = TunableFiles(
        folder,
        dtype=dtype,
        seed=config.server.random_seed,
        blocks=config.n_block or 0,
        classes=classes,
        scratch=not config.server.parameters.load,
    )
    shape = config.shape
    segments = cut_for(shape, files.blocks, config.server.cut_layers, config.server.tail_blocks)
    recipe = Recipe(config, files, shape, segments, objective_for(files.family.name, objectives))
    if recipe.lora is not None:
        check_targets(recipe.lora, files)
    return recipe


class OwnerData:
    """An owner's rows, and the microbatches of each round.

    Args:
        recipe: the run's.
        number: of the owner.
        rows: of training, all owners' or its own.
        valid: of validation, or None.
        own: whether all ``rows`` are this owner's; otherwise it takes its share of them.
    """

    def __init__(self, recipe: Recipe, number: int, rows: Rows, valid: Rows | None, *, own: bool = False) -> None:
        self._recipe, self._number, self._rows, self._own = recipe, number, rows, own
        self._codec = TextCodec(recipe.files.folder)
        self._valid = encoded(recipe, self._codec, valid, range(len(valid))) if valid is not None else []
        self.mark = rows.fingerprint
        """Tells these rows from others'."""
        self._examples: list[Example] = []
        self._drawn = -1

    def round(self, round_: int) -> list[Microbatch]:
        """The microbatches of one round."""
        config = self._recipe.config
        seed = config.server.random_seed
        fresh = config.server.data_distribution.refresh_each_round
        draw = round_ if fresh else 0
        if draw != self._drawn:
            self._examples, self._drawn = self._encoded(seed + draw), draw
        return microbatches(self._examples, config.learning.batch_size, seed=seed + self._number, round=round_)

    def validation(self) -> list[Microbatch]:
        """The microbatches of a validation."""
        size = self._recipe.config.learning.batch_size
        return microbatches(self._valid, size, seed=0, round=0)

    def _share(self, seed: int) -> Sequence[int]:
        if self._own:
            return range(len(self._rows))
        spread = self._recipe.config.server.data_distribution
        return distribute(
            self._rows.groups,
            self._recipe.config.server.owners,
            non_iid=spread.non_iid,
            num_sample=spread.num_sample,
            num_label=spread.num_label,
            alpha=spread.dirichlet.alpha,
            seed=seed,
        )[self._number]

    def _encoded(self, seed: int) -> list[Example]:
        return encoded(self._recipe, self._codec, self._rows, self._share(seed))


def encoded(recipe: Recipe, codec: TextCodec, rows: Rows, share: Sequence[int]) -> list[Example]:
    """Some rows as examples of the run's model, in their order.

    Raises:
        UsageError: as ``finetune.data.encode``.
    """
    files, goal = recipe.files, recipe.goal
    classes = None if goal.token_loss else int(files.config.num_labels)
    vocab = int(files.config.vocab_size)
    return encode(rows, codec, goal, context=files.context, num_labels=classes, vocab=vocab, only=share).of(list(share))


def read_rows(config: RunConfig, split: str, own: Path | None = None) -> Rows:
    """The rows that the settings name, or those of a file of the owner's own.

    Raises:
        DataMissingError: they are nowhere.
        UsageError: they are not as they should be.
    """
    server = config.server
    base = own or (Path(server.data_path) if server.data_path is not None else None)
    return load_rows(server.data_name, split, base)
