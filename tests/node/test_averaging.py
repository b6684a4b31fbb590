"""A worker that averages in the coordinator's place: the numbers are the same, and so is what is left of the run."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from splitlm.core import training
from splitlm.core.config import RunConfig
from splitlm.core.errors import NetworkError, PeerLostError, UsageError
from splitlm.node import party as party_module
from splitlm.node.aggregator import StateHub
from tests.node.test_training_faults import is_
from tests.node.test_tuning import config, model_folder, rows_file
from tests.node.training_scene import Scene, Who, once, play, weights

Make = Callable[..., RunConfig]
HOST = socket.gethostname()


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Settings of a run of two rounds over a tiny BERT with dropout."""
    folder = model_folder("bert", tmp_path / "model", 0.2)
    data = rows_file(tmp_path, "classify")

    def made(
        owners: int, workers: int, node: str | None, learning: dict[str, Any] | None = None, **server: Any
    ) -> RunConfig:
        server = {"clients": [owners, workers], "aggregator": node, **server}
        return config(folder, data, server=server, learning={"body-sync": "window", **(learning or {})})

    return made


def same(one: Path, other: Path, made: RunConfig, *parties: str) -> None:
    """The last rounds of two runs hold the same weights, and their models do."""
    for party in parties:
        left, right = weights(one, made, party), weights(other, made, party)
        assert left.keys() == right.keys()
        for name, tensor in left.items():
            torch.testing.assert_close(tensor, right[name], rtol=0, atol=1e-9)
    models = [load_file(run / "model" / "model.safetensors") for run in (one, other)]
    assert models[0].keys() == models[1].keys()
    for name, tensor in models[0].items():
        torch.testing.assert_close(tensor, models[1][name], rtol=0, atol=1e-6, check_dtype=False)


def states_at(patch: pytest.MonkeyPatch) -> list[str]:
    """On whose compute thread's account each role is averaged."""
    names: list[str] = []
    average = StateHub._average

    def watched(self: StateHub, *args: Any) -> Any:
        inner = self._runner._runner
        names.append(inner.where() if hasattr(inner, "where") else "the coordinator")
        return average(self, *args)

    patch.setattr(StateHub, "_average", watched)
    return names


@pytest.mark.parametrize(
    ("owners", "workers", "node", "more"),
    [
        (2, 2, "worker-1", {}),
        (1, 2, HOST, {"learning": {"body-sync": "round", "u-shape": {"adaptive-weights": False}}}),
        (2, 1, "worker-0", {"architecture": "two-stage", "cut-layers": 2}),
    ],
)
def test_a_run_ends_as_if_the_coordinator_had_averaged(
    owners: int,
    workers: int,
    node: str,
    more: dict[str, Any],
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = states_at(monkeypatch)
    whole = play(make(owners, workers, None, **more), tmp_path / "whole", monkeypatch)
    assert whole.error is None and set(names) == {"the coordinator"}
    names.clear()
    made = make(owners, workers, node, **more)
    scene = play(made, tmp_path / "run", monkeypatch)
    assert scene.error is None and set(scene.ends.values()) == {None}
    at = node.replace("-", " ") if node != HOST else "worker 0"
    assert len(names) == 4 and all(name.startswith(at) for name in names)
    parties = [f"owner-{n}" for n in range(owners)] + [f"worker-{n}" for n in range(workers)]
    if more.get("architecture") != "two-stage":  # where what two owners send comes in either order
        same(tmp_path / "whole", tmp_path / "run", made, *parties)
    rows = [[row for kind, row in of.rows if kind == "round"] for of in (whole, scene)]
    assert [row["samples"] for row in rows[0]] == [row["samples"] for row in rows[1]] == [40, 40]
    assert [row.keys() for row in rows[0]] == [row.keys() for row in rows[1]]


def test_what_the_model_is_worth_is_told_by_who_averages(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    data = tmp_path / "rows"
    data.mkdir()
    for split, part in (("train", rows[:30]), ("validation", rows[30:36]), ("test", rows[36:])):
        (data / f"{split}.jsonl").write_text("".join(part))
    found = []
    for name, node in (("whole", None), ("run", "worker-0")):
        made = make(1, 1, node, validation=True, **{"data-path": str(data)})
        scene = play(made, tmp_path / name, monkeypatch)
        assert scene.error is None
        found.append([row for kind, row in scene.rows if kind == "round"])
    assert found[0] == found[1] and all("central_accuracy" in row for row in found[1])


def test_a_run_is_gone_on_with_where_a_worker_averages(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, run = make(1, 2, "worker-1"), tmp_path / "run"
    assert play(made, tmp_path / "whole", monkeypatch).error is None
    play(made, run, monkeypatch, once(is_("to", ("owner", 0), training.Gather, round=1), Scene.stop_lead))
    assert play(made, run, monkeypatch, resume=True).error is None
    same(tmp_path / "whole", run, made, "owner-0", "worker-0", "worker-1")


@pytest.mark.parametrize("moment", [training.Window, training.Gather])
def test_another_worker_that_is_lost_costs_what_it_costs_elsewhere(
    moment: type, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that averages is told while it waits for the average itself."""
    made, lost = make(1, 2, "worker-0"), ("worker", 1)
    scene = play(
        made, tmp_path / "run", monkeypatch, once(is_("to", lost, moment, round=0), lambda scene: scene.kill(lost))
    )
    assert scene.error is None and scene.ends == {("owner", 0): None, ("worker", 0): None}
    assert play(make(1, 2, None), tmp_path / "whole", monkeypatch).error is None
    same(tmp_path / "whole", tmp_path / "run", made, "owner-0", "worker-0")


def test_the_run_ends_with_the_worker_that_averages(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, lost = make(1, 2, "worker-0"), ("worker", 0)
    strike = once(is_("to", ("owner", 0), training.Window, round=1), lambda scene: scene.kill(lost))
    scene = play(made, tmp_path / "run", monkeypatch, strike)
    assert isinstance(scene.error, PeerLostError)
    text = str(scene.error)
    assert text.startswith("worker 0 (") and "which averages for all" in text and "--resume" in text


def test_a_node_that_is_none_of_the_workers_is_named_before_anything_begins(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[object] = []

    def note(scene: Scene, way: str, who: Who, message: Any) -> None:
        begun.extend([message] * isinstance(message, training.Start))

    scene = play(make(1, 2, "worker-2"), tmp_path / "run", monkeypatch, note)
    assert isinstance(scene.error, UsageError) and begun == []
    text = str(scene.error)
    assert "'worker-2'" in text and f"worker-0 to worker-1, or {HOST}" in text and "server.aggregator" in text


def test_who_averages_needs_a_folder_for_the_model(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = party_module.Averaging
    monkeypatch.setattr(party_module, "Averaging", lambda door, **of: inner(door, **{**of, "folder": None}))
    scene = play(make(1, 1, "worker-0"), tmp_path / "run", monkeypatch)
    assert isinstance(scene.error, UsageError) and "--folder" in str(scene.error)


def test_a_state_that_cannot_be_averaged_ends_the_run(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StateHub, "_average", lambda *_: (_ for _ in ()).throw(ValueError("4711")))
    scene = play(make(1, 1, "worker-0"), tmp_path / "run", monkeypatch)
    assert scene.error is not None and not isinstance(scene.error, NetworkError)
    assert "the aggregator" in str(scene.error) and "4711" not in str(scene.error)
