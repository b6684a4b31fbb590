"""Training a cut model equals training it whole: every part alone, handing over what would travel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from splitlm.core.shape import cut_for, find_shape
from splitlm.finetune.objective import Objective
from splitlm.model.lora import Lora
from splitlm.model.seeding import Seeding
from splitlm.model.stepping import GradientSum, Stepping, step
from splitlm.model.tunable import TunableFiles
from splitlm.model.tuned import TunedPart, tie, unique
from splitlm.model.uncut_train import UncutTrainer
from tests.tiny_tune import BLOCKS, FAMILIES, Batch, batches, build

GOALS = {
    True: Objective(needs_mask=True, token_loss=False, shift_labels=False, label_key="label"),
    False: Objective(needs_mask=True, token_loss=True, shift_labels=True, label_key="ids"),
}
WINDOWS, MICROBATCHES = 6, 3


class Chain:
    """All parts of one owner and one worker, one after the other."""

    def __init__(
        self, files: TunableFiles, segments: Sequence[Any], places: Sequence[str], stepping: Stepping, **how: Any
    ):
        self.goal = how.pop("goal")
        seed = how.pop("seed")
        self.seeding = Seeding(seed) if seed is not None else None
        self.places, self.stepping = places, stepping
        self.parts: list[TunedPart] = [None] * len(segments)  # type: ignore[list-item]
        for role in ("owner", "worker"):
            mine = [i for i, place in enumerate(places) if place == role]
            for i, part in zip(mine, files.load([segments[i] for i in mine]), strict=True):
                self.parts[i] = TunedPart(part, files, seeding=self.seeding, **how)
        self.of = {
            role: [p for p, at in zip(self.parts, places, strict=True) if at == role] for role in ("owner", "worker")
        }
        for parts in self.of.values():
            tie(parts)
        self.parameters = {role: unique(parts) for role, parts in self.of.items()}
        self.optimizers = {role: stepping.make(p) for role, p in self.parameters.items()}

    def window(self, window: int, of: Sequence[Batch]) -> float:
        keys = [(0, i) for i in range(len(of))]
        sums = {role: GradientSum(p, keys) for role, p in self.parameters.items()}
        total, mean = len(of), 0.0
        forward: dict[tuple[int, int], float] = {}
        order = keys[::-1]  # out of turn: the sums must not depend on it
        for key in order:
            batch = of[key[1]]
            at = batch.ids
            if self.seeding is not None:
                self.seeding.at(0, window, *key)
            for part in self.parts[:-1]:
                at = part.forward(key, at, batch.mask).clone()
            scale = 1.0 / (batch.weight * total)
            value, _ = self.parts[-1].score(key, at, batch.mask, batch.labels, self.goal, scale)
            forward[key] = value * scale
        for key in order[1:] + order[:1]:
            gradient = None
            for i in reversed(range(len(self.parts))):
                gradient = self.parts[i].backward(key, gradient)
                role = self.places[i]
                sums[role].take(key, whole=self.parts[i] is self.of[role][0])
        for role, total_of in sums.items():
            assert total_of.done
            step(self.optimizers[role], self.parameters[role], total_of.total, self.stepping)
        mean = sum(forward.values())
        assert not any(part.live for part in self.parts)
        return mean


@pytest.mark.parametrize("lora", [None, Lora(r=4, alpha=8)], ids=["full", "lora"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_parts_train_as_the_whole(family: str, dropout: float, lora: Lora | None, tmp_path: Path) -> None:
    shape = find_shape("u-shape")
    folder = build(family, tmp_path, dropout)
    files = TunableFiles(folder, dtype="float64", seed=3)
    segments = cut_for(shape, BLOCKS, 1, 1)
    stepping = Stepping(learning_rate=1e-2, clip_grad_norm=0.5)
    goal = GOALS[family == "bert"]
    chain = Chain(files, segments, shape.places, stepping, seed=7 if dropout else None, lora=lora, goal=goal)
    whole = UncutTrainer(files, shape, segments, goal, stepping, seed=7 if dropout else None, lora=lora)
    classify = family == "bert"
    losses = []
    for window in range(WINDOWS):
        of = batches(MICROBATCHES, classify=classify, seed=window)
        ours, reference = chain.window(window, of), whole.window(0, window, {0: of})
        assert ours == pytest.approx(reference, abs=1e-9)
        losses.append(ours)
    trained = {n: p for parameters in chain.parameters.values() for n, p in parameters.items()}
    expected = whole.own[0] | whole.body
    assert trained.keys() == expected.keys()
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-9)
    assert losses[-1] != pytest.approx(losses[0], abs=1e-6)
