"""Training without a cut, in one process: what every parity test of training compares with.

One owner after the other and one microbatch after the other, in the order of their indices. Every owner has the first
and the last part of the model to itself; the body is one, or one per worker. Each partition has its own optimizer, and
is clipped alone.
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
from splitlm.model.tuned import Goal, TunedPart, untie


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
    """The whole model, once per owner, with one body for all, or one per worker.

    Args:
        files: the model.
        shape: who would hold which part.
        cut: the segment of each part.
        goal: as in ``TunedPart.score``.
        owners: how many.
        bodies: how many: workers that take the same steps have one, workers that drift until the round's end one each.
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
        bodies: int = 1,
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
                untie(part, files)
        prefixes = tuple(prefix for segment in remote for prefix in residency.prefixes(files.family, segment))
        first = self.parts[0].parameters()
        self.body = {name: p for name, p in first.items() if name.startswith(prefixes)}
        for part in self.parts[1:]:
            _share(part, self.body)
        self.bodies = [self.body, *({n: _copied(p) for n, p in self.body.items()} for _ in range(1, bodies))]
        self.own = [{n: p for n, p in part.parameters().items() if n not in self.body} for part in self.parts]
        self._optimizers = [stepping.make(own) for own in self.own]
        self._body_optimizers = [stepping.make(body) for body in self.bodies]

    def window(
        self,
        round_: int,
        window: int,
        batches: Mapping[int, Sequence[Batch]],
        assign: Mapping[int, Sequence[int]] | None = None,
    ) -> float:
        """One window over every owner's microbatches; the mean loss.

        Args:
            round_: of the run.
            window: of the round.
            batches: by owner.
            assign: the body that each of them goes through; the first, if nothing is said.
        """
        owns, works = [0] * len(self.own), [0] * len(self.bodies)
        for owner, of in batches.items():
            for index, batch in enumerate(of):
                count = batch.weight if self._token else 1
                owns[owner] += count
                works[assign[owner][index] if assign is not None else 0] += count
        total = sum(owns)
        mean = self._sum(round_, window, batches, assign, total)
        partitions = zip(
            (*self._optimizers, *self._body_optimizers), (*self.own, *self.bodies), (*owns, *works), strict=True
        )
        for optimizer, partition, count in partitions:
            if count:
                self._step(optimizer, partition, total / count)
        return mean

    def steps(self, round_: int, number: int, batches: Sequence[Batch]) -> float:
        """One window where nothing is agreed, of one owner: the body steps after every microbatch; the mean loss."""
        part, seeding, mean = self.parts[0], self._seedings[0], 0.0
        for index, batch in enumerate(batches):
            if seeding is not None:
                seeding.at(round_, number, 0, index)
            value, items = part.score((0, index), batch.ids, batch.mask, batch.labels, self._goal, 1.0 / batch.weight)
            part.backward((0, index))
            mean += value / items / len(batches)
            self._step(self._body_optimizers[0], self.body)
        self._step(self._optimizers[0], self.own[0], 1.0 / len(batches))
        return mean

    def average(self, samples: Sequence[int], worked: Sequence[int] = ()) -> None:
        """A round's end: partitions are averaged, weighted by the samples of each; optimizers go on.

        Args:
            samples: of each owner.
            worked: of each body; nothing where there is one.
        """
        _average(self.own, samples)
        if worked:
            _average(self.bodies, worked)

    def reset(self) -> None:
        """Forget the optimizers' states."""
        self._optimizers = [self._stepping.make(own) for own in self.own]
        self._body_optimizers = [self._stepping.make(body) for body in self.bodies]

    def _step(
        self, optimizer: torch.optim.Optimizer | None, partition: Mapping[str, nn.Parameter], scale: float = 1.0
    ) -> None:
        gradients = {n: p.grad for n, p in partition.items() if p.grad is not None}
        step(optimizer, partition, gradients, self._stepping, scale)

    def _sum(
        self,
        round_: int,
        window: int,
        batches: Mapping[int, Sequence[Batch]],
        assign: Mapping[int, Sequence[int]] | None,
        total: int,
    ) -> float:
        mean = 0.0
        for owner, of in sorted(batches.items()):
            part, seeding = self.parts[owner], self._seedings[owner]
            for index, batch in enumerate(of):
                if seeding is not None:
                    seeding.at(round_, window, owner, index)
                if assign is not None:
                    _share(part, self.bodies[assign[owner][index]])
                scale = 1.0 / total if self._token else 1.0 / (batch.weight * total)
                key = (owner, index)
                value, _ = part.score(key, batch.ids, batch.mask, batch.labels, self._goal, scale)
                part.backward(key)
                mean += value * scale
        return mean


def _copied(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)


def _average(partitions: Sequence[Mapping[str, nn.Parameter]], samples: Sequence[int]) -> None:
    """Give each the mean of all, weighted; without any sample all stay as they are."""
    if not (total := sum(samples)):
        return
    for name in partitions[0]:
        taken = [(of[name].detach(), n / total) for of, n in zip(partitions, samples, strict=True) if n]
        mean = torch.stack([tensor * share for tensor, share in taken]).sum(dim=0)
        for of in partitions:
            with torch.no_grad():
                of[name].copy_(mean)


def _share(part: TunedPart, body: Mapping[str, nn.Parameter]) -> None:
    """Let a model use the body's parameters instead of its own."""
    module: Any = part.part.module
    for local, name in part.names.items():
        if name in body:
            path, _, last = local.rpartition(".")
            setattr(module.get_submodule(path), last, body[name])
