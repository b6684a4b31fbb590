"""A model's directory as training opens it: fewer blocks, a head of its own, or no weights at all.

What is made here instead of read (the head of a classifier on a language model's body, a model from scratch) is seeded
by each module's name in the whole model, so it is the same on whichever machine, and whatever the cut.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from splitlm.core.errors import CheckpointError, UsageError
from splitlm.model.config import read_config
from splitlm.model.generator import draws_apart
from splitlm.model.index import CheckpointIndex
from splitlm.model.load import ModelFiles
from splitlm.model.skeleton import block_factory, build_skeleton

_log = logging.getLogger(__name__)

OLD_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""How the first published checkpoints called them."""


def seed_of(*parts: object) -> int:
    """A seed of 63 bits that depends on every part."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


class TunableFiles(ModelFiles):
    """``ModelFiles`` for training.

    Args:
        folder: a model directory; without weights where ``scratch``.
        seed: of what is made here.
        blocks: how many of the model's blocks to take, from the first; 0 for all.
        classes: size of a classifier's head; 0 keeps what the config says.
        scratch: whether all weights are made here.

    Raises:
        UsageError: more blocks than the model has. Otherwise as ``ModelFiles``.
    """

    tasks = ("causal", "classify")

    def __init__(
        self,
        folder: Path,
        *,
        family: str = "",
        dtype: str = "auto",
        seed: int = 1,
        blocks: int = 0,
        classes: int = 0,
        scratch: bool = False,
    ) -> None:
        self.seed, self._take, self._classes, self._scratch = seed, blocks, classes, scratch
        super().__init__(folder, family=family, dtype="float32" if scratch and dtype == "auto" else dtype)

    def _open(self, folder: Path) -> CheckpointIndex:
        return CheckpointIndex(folder, weights=not self._scratch)

    def _configured(self) -> Any:
        config = copy.deepcopy(read_config(self.folder, self.index.config, self.family))
        if self._take:
            has = int(config.num_hidden_layers)
            if self._take > has:
                raise UsageError(
                    f"n_block is {self._take} and the model has {has} blocks",
                    where="server.model",
                    expected=f"1 to {has}",
                )
            config.num_hidden_layers = self._take
            for name in self.family.per_block:
                if getattr(config, name, None) is not None:
                    setattr(config, name, list(getattr(config, name))[: self._take])
        if self._classes and self.family.task == "classify":
            config.num_labels = max(self._classes, stored := self._stored_classes)
            if 0 < stored < self._classes:
                _log.warning(
                    "%s: its head is of %d classes and the rows have %d: it is made anew",
                    self.folder,
                    stored,
                    self._classes,
                )
            config.problem_type = "single_label_classification"
        return config

    @property
    def _stored_classes(self) -> int:
        """Classes of a head that is taken from the checkpoint; 0 where there is none."""
        entry = None if self._scratch else self.index.entries.get(self.family.head_key)
        return int(entry.shape[0]) if entry is not None and entry.shape else 0

    def _check_blocks(self) -> None:
        if not self._scratch and not self._take:
            super()._check_blocks()

    def key(self, name: str) -> str:
        """The checkpoint's key of a parameter of the whole model."""
        found = super().key(name)
        if found not in self.index:
            for new, old in OLD_NAMES.items():
                if found.endswith(new) and (older := found.removesuffix(new) + old) in self.index:
                    return older
        return found

    def block(self) -> nn.Module:
        """The first block without weights, to see what modules the model's blocks have."""
        return block_factory(self._model, self.config, self.family, self.dtype, str(self.folder))(0)

    def is_fresh(self, _key: str) -> bool:
        """Whether a tensor is made here: all of them from scratch, or a classifier's head that was never stored.

        A stored head of fewer classes than the rows have is made anew too; one of more keeps those that have no row.
        """
        if self._scratch:
            return True
        key = _key
        if self.family.task != "classify" or not key.startswith((f"{self.family.head}.", self._pooler)):
            return False
        if key not in self.index:
            return True
        head = key.startswith(f"{self.family.head}.")
        return head and self.index.entry(key).shape[0] != int(self.config.num_labels)

    @cached_property
    def _model(self) -> Any:
        """Knows how modules are initialised; has no block, and no weights."""
        model = build_skeleton(self.config, self.family, self.dtype, str(self.folder))
        config = copy.deepcopy(self.config)  # of as many blocks as the whole has: some begin smaller the more there are
        config._attn_implementation = model.config._attn_implementation
        model.config = config
        return model

    @property
    def _pooler(self) -> str:
        return super().key(f"{self.family.base}.{self.family.norm}.")

    def _made(self, module: nn.Module, prefix: str, local: str) -> torch.Tensor:
        """One parameter as transformers initialises the module that owns it, and then the one around that.

        GPT-2 makes its projections back into the stream smaller in the second step. A tied head is made as the
        embedding is, so that both are the same where they are on two machines.
        """
        if self.tied and prefix + local == self.family.head_key:
            module, local = self._model, self.family.embed_key
        path, _, name = local.rpartition(".")
        owner = module.get_submodule(path) if path else module
        # Every parameter of the owner is made in one go, on a copy, so that each is what it is whoever asks first.
        trial = copy.copy(owner)
        trial._parameters = {
            n: nn.Parameter(torch.full(p.shape, torch.nan, dtype=torch.float32), False) if p is not None else None
            for n, p in owner._parameters.items()  # transformers looks whether there is a bias
        }
        trial._buffers = dict(owner._buffers)
        around, _, place = path.rpartition(".")
        holder = copy.copy(module.get_submodule(around)) if around else None
        if holder is not None:
            holder._modules = {**holder._modules, place: trial}
            holder._buffers = {n: b if b is None else b.clone() for n, b in holder._buffers.items()}
        with draws_apart(seed_of(self.seed, prefix + path)), torch.no_grad():
            self._model._init_weights(trial)
            if holder is not None:
                self._model._init_weights(holder)
        made = trial._parameters[name]
        if made is None or bool(made.isnan().any()):
            raise CheckpointError(
                f"transformers does not say how {prefix + local} begins",
                where=str(self.folder),
                expected="a parameter that it initialises",
                remedy="Start from a checkpoint that has it",
            )
        return made.detach().to(self.dtype)
