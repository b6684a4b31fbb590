"""Dropout that does not depend on the cut: every module with dropout in it is seeded just before it runs.

The seed is a hash of the run's seed, round, window, owner, microbatch, and the module's place in the whole model. The
generator is the process's own, so a forward in training holds it (``model/generator``) from its first seed to its end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from splitlm.core.cut import Segment
from splitlm.model.family import Family
from splitlm.model.tunable import seed_of

EMBEDDING, HEAD = -1, -2
"""Places of the modules that are no blocks."""


class Seeding:
    """The seeds of one node.

    Args:
        seed: of the run.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._now: tuple[int, ...] = ()

    def at(self, *now: int) -> None:
        """What runs next belongs to this round, window, owner and microbatch."""
        self._now = now

    def attach(self, model: Any, family: Family, segment: Segment) -> None:
        """Seed the modules of a segment before each of their forwards in training mode.

        Args:
            model: the whole model, or what the segment holds of it.
        """
        base = getattr(model, family.base)
        places = dict(zip(segment.blocks, family.blocks_of(base), strict=True))
        if segment.embed:
            places[EMBEDDING] = getattr(base, family.embed)
        if segment.head:
            places[HEAD] = getattr(base, family.norm)
        for place, module in places.items():
            module.register_forward_pre_hook(self._hook(place))

    def _hook(self, place: int) -> Any:
        def seed(module: nn.Module, _: Any) -> None:
            if not module.training:
                return
            number = seed_of(self._seed, *self._now, place)
            weight = next(module.parameters(), None)
            if weight is not None and weight.device.type == "cpu":
                torch.default_generator.manual_seed(number)  # and not those of all devices, which takes far longer
            else:
                torch.manual_seed(number)

        return seed
