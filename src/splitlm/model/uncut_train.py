"""Training without a cut, in one process: what every parity test of training compares with.

One owner after the other and one microbatch after the other, in the order of their indices. Every owner has the first
and the last part of the model to itself; the body is one. Each partition has its own optimizer, and is clipped alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from splitlm.core.cut import Segment
from splitlm.core.shape import Shape
from splitlm.model import residency
from splitlm.model.lora import Lora
from splitlm.model.seeding import Seeding
from splitlm.model.stepping import Stepping, step
from splitlm.model.tunable import TunableFiles
from splitlm.model.tuned import Goal, TunedPart


class Batch(Protocol):
    """What is used of a microbatch, see ``finetune.batch.Microbatch``."""

    @property
    def ids(self) -> torch.Tensor:
        """``[B, T]``."""
        ...

    @property
    def mask(self) -> torch.Tensor:
        """``[B, T]``."""
        ...

    @property
    def labels(self) -> torch.Tensor:
        """``[B]`` or ``[B, T]``."""
        ...

    @property
    def weight(self) -> int:
        """Items of its loss."""
        ...


class UncutTrainer:
    """The whole model, once per owner, with one body for all.

    Args:
        files: the model.
        shape: who would hold which part.
        cut: the segment of each part.
        goal: as in ``TunedPart.score``.
        owners: how many.
        seed: of dropout; None turns it off.
    """

    def __init__(
        self,
        files: TunableFiles,
        shape: Shape,
        cut: Sequence[Segment],
        goal: Goal,
        stepping: Stepping,
        *,
        owners: int = 1,
        seed: int | None = None,
        lora: Lora | None = None,
        frozen_embedding: bool = False,
        token_weighted: bool = False,
    ) -> None:
        self._goal, self._stepping, self._token = goal, stepping, token_weighted
        self._seedings = [Seeding(seed) if seed is not None else None for _ in range(owners)]
        whole = Segment(0, files.blocks, embed=True, head=True)
        self.parts = [
            TunedPart(files.load([whole])[0], files, seeding=s, lora=lora, frozen_embedding=frozen_embedding)
            for s in self._seedings
        ]
        remote = [segment for segment, place in zip(cut, shape.places, strict=True) if place == "worker"]
        if files.tied and any(segment.head for segment in remote):
            for part in self.parts:  # whoever holds the head alone has a table of its own
                _untie(part, files)
        prefixes = tuple(prefix for segment in remote for prefix in residency.prefixes(files.family, segment))
        first = self.parts[0].parameters()
        self.body = {name: p for name, p in first.items() if name.startswith(prefixes)}
        for part in self.parts[1:]:
            _share(part, self.body)
        self.own = [{n: p for n, p in part.parameters().items() if n not in self.body} for part in self.parts]
        self._optimizers = [stepping.make(own) for own in self.own]
        self._body_optimizer = stepping.make(self.body)

    def window(self, round_: int, window: int, batches: Mapping[int, Sequence[Batch]]) -> float:
        """One window over every owner's microbatches; the mean loss."""
        total = sum(batch.weight if self._token else 1 for of in batches.values() for batch in of)
        sums = self._sum(round_, window, batches, total)
        for owner, optimizer in enumerate(self._optimizers):
            own = sum(batch.weight if self._token else 1 for batch in batches.get(owner, ()))
            if own:
                gradients = {n: p.grad for n, p in self.own[owner].items() if p.grad is not None}
                step(optimizer, self.own[owner], gradients, self._stepping, total / own)
        gradients = {n: p.grad for n, p in self.body.items() if p.grad is not None}
        step(self._body_optimizer, self.body, gradients, self._stepping)
        return sums

    def steps(self, round_: int, number: int, batches: Sequence[Batch]) -> float:
        """One window where nothing is agreed, of one owner: the body steps after every microbatch; the mean loss."""
        part, seeding, mean = self.parts[0], self._seedings[0], 0.0
        for index, batch in enumerate(batches):
            if seeding is not None:
                seeding.at(round_, number, 0, index)
            value, items = part.score((0, index), batch.ids, batch.mask, batch.labels, self._goal, 1.0 / batch.weight)
            part.backward((0, index))
            mean += value / items / len(batches)
            gradients = {n: p.grad for n, p in self.body.items() if p.grad is not None}
            step(self._body_optimizer, self.body, gradients, self._stepping)
        gradients = {n: p.grad for n, p in self.own[0].items() if p.grad is not None}
        step(self._optimizers[0], self.own[0], gradients, self._stepping, 1.0 / len(batches))
        return mean

    def average(self, samples: Sequence[int]) -> None:
        """A round's end: the owners' partitions are averaged, weighted by the samples of each; optimizers go on."""
        total = sum(samples)
        for name in self.own[0]:
            mean = sum((own[name].detach() * (n / total) for own, n in zip(self.own, samples, strict=True)), start=0.0)
            for own in self.own:
                with torch.no_grad():
                    own[name].copy_(torch.as_tensor(mean))

    def _sum(self, round_: int, window: int, batches: Mapping[int, Sequence[Batch]], total: int) -> float:
        mean = 0.0
        for owner, of in sorted(batches.items()):
            part, seeding = self.parts[owner], self._seedings[owner]
            for index, batch in enumerate(of):
                if seeding is not None:
                    seeding.at(round_, window, owner, index)
                scale = 1.0 / total if self._token else 1.0 / (batch.weight * total)
                key = (owner, index)
                value, _ = part.score(key, batch.ids, batch.mask, batch.labels, self._goal, scale)
                part.backward(key)
                mean += value * scale
        return mean


def _untie(part: TunedPart, files: TunableFiles) -> None:
    head: Any = getattr(part.part.module, files.family.head)
    head.weight = nn.Parameter(head.weight.detach().clone())
    part.name_parameters()


def _share(part: TunedPart, body: Mapping[str, nn.Parameter]) -> None:
    """Let a model use the body's parameters instead of its own."""
    module: Any = part.part.module
    for local, name in part.names.items():
        if name in body:
            path, _, last = local.rpartition(".")
            setattr(module.get_submodule(path), last, body[name])
