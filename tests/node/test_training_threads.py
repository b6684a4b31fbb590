"""Parties of one process train at once, each on a thread of its own: dropout is what it is on one thread."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from splitlm.core.cut import Segment
from splitlm.model.generator import GENERATOR, draws_apart
from splitlm.model.seeding import Seeding
from splitlm.model.tunable import TunableFiles
from splitlm.model.tuned import TunedPart
from tests.node.test_tuning import config, model_folder, rows_file
from tests.node.training_scene import play, weights

SYNCED: dict[str, Any] = {"body-sync": "window", "u-shape": {"microbatches-per-window": 5, "timeout-seconds": 30}}


def test_a_run_on_a_thread_for_each_party_equals_that_on_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, data = model_folder("bert", tmp_path / "model", 0.2), rows_file(tmp_path, "classify")
    made = config(folder, data, server={"clients": [2, 2]}, learning=SYNCED)
    assert play(made, tmp_path / "one", monkeypatch).error is None
    assert play(made, tmp_path / "each", monkeypatch, threads=True).error is None
    for party in ("owner-0", "owner-1", "worker-0", "worker-1"):
        one, each = (weights(tmp_path / run, made, party) for run in ("one", "each"))
        assert {name for name, of in one.items() if float((of - each[name]).abs().max()) > 1e-9} == set()


def test_whoever_seeds_waits_for_a_forward_that_has_begun(tmp_path: Path) -> None:
    """A forward is stopped in its middle, and another thread seeds the generator and draws from it."""
    folder = model_folder("bert", tmp_path / "model", 0.2)
    files = TunableFiles(folder)
    seeding = Seeding(1)
    part = TunedPart(files.load([Segment(0, files.blocks, embed=True, head=False)])[0], files, seeding=seeding)
    ids, mask = torch.ones(2, 5, dtype=torch.int64), torch.ones(2, 5, dtype=torch.int64)
    drawn: list[threading.Thread] = []

    def draw() -> None:
        with draws_apart(7):
            torch.rand(3)

    def meddle(*_: Any) -> None:
        if drawn:
            return
        drawn.append(threading.Thread(target=draw))
        drawn[0].start()
        drawn[0].join(0.3)
        assert drawn[0].is_alive()  # it waits

    seeding.at(0, 0, 0, 0)
    alone = part.forward((0, 0), ids, mask)
    layer = next(m for m in part.part.module.modules() if isinstance(m, torch.nn.Dropout))
    layer.register_forward_pre_hook(meddle)
    seeding.at(0, 0, 0, 0)
    assert torch.equal(part.forward((0, 1), ids, mask), alone)
    drawn[0].join(10)
    assert not drawn[0].is_alive()
    assert GENERATOR.acquire(timeout=10)
    GENERATOR.release()
