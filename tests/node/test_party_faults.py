"""What goes wrong in a party's own work, and what it does about workers that are slow, or gone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from splitlm.core import training
from splitlm.core.config import RunConfig
from splitlm.planner.routing import SmoothWRR
from tests.node.test_training_faults import WORKER, is_
from tests.node.test_tuning import config, model_folder, rows_file
from tests.node.training_scene import once, play


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., RunConfig]:
    """Settings of a run of one round over a tiny BERT."""

    def made(workers: int, batch: int = 3, **shape: object) -> RunConfig:
        folder, data = model_folder("bert", tmp_path / "model", 0.0), rows_file(tmp_path, "classify")
        settings = {"microbatches-per-window": 3, "timeout-seconds": 30, **shape}
        return config(
            folder,
            data,
            server={"clients": [1, workers], "global-round": 1},
            learning={"batch-size": batch, "body-sync": "window", "u-shape": settings},
        )

    return made


def test_weights_follow_speeds_again_once_a_worker_is_lost(
    make: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[dict[int, float]] = []
    reweigh = SmoothWRR.reweigh

    def watched(self: SmoothWRR[int], weights: dict[int, float]) -> None:
        taken.append(dict(weights))
        reweigh(self, weights)

    monkeypatch.setattr(SmoothWRR, "reweigh", watched)
    strike = once(is_("to", WORKER, training.Window, window=0), lambda scene: scene.kill(WORKER))
    scene = play(make(3), tmp_path / "run", monkeypatch, strike)
    assert scene.error is None
    assert taken[0] == {0: 1.0, 2: 1.0}, "it is forgotten at once"
    assert all(weights.keys() == {0, 2} for weights in taken)
    assert taken[-1][0] != 1.0 != taken[-1][2], "measured speeds count"
