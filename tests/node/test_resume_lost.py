"""A run whose rounds are lost is not begun anew over what it made; one that never had a round is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from splitlm.core.config import RunConfig
from splitlm.core.errors import CheckpointError, ModelError, UsageError
from splitlm.finetune.manifest import MANIFEST
from splitlm.finetune.store import RunFolder
from tests.node.test_tuning import config, model_folder, rows_file
from tests.node.training_scene import play


@pytest.fixture
def made(tmp_path: Path) -> RunConfig:
    """Settings of a run of two rounds."""
    server = {"clients": [1, 1], "global-round": 2, "validation": False}
    return config(model_folder("bert", tmp_path / "of", 0.0), rows_file(tmp_path, "classify"), server=server)


def held(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def cut_short(folder: Path) -> None:
    (folder / "party-owner-0.safetensors").write_bytes(b"short")


def without_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def strange_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"round": 1e400}')


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut_short, "000000/party-owner-0.safetensors (It has 5 bytes"),
        (without_manifest, "no rounds/000000/manifest.json and no rounds/000001/manifest.json"),
        (strange_manifest, "000001/manifest.json (The manifest cannot be read"),
    ],
)
def test_a_run_whose_rounds_are_lost_is_left_as_it_is(
    damage: Callable[[Path], None], says: str, made: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    assert play(made, run, monkeypatch).error is None
    for folder in (run / "rounds").iterdir():
        damage(folder)
    before = held(run)
    assert "model/model.safetensors" in before
    scene = play(made, run, monkeypatch, resume=True)
    assert isinstance(scene.error, CheckpointError) and scene.error.exit_code == 4
    assert says in str(scene.error) and held(run) == before


def test_a_run_that_was_killed_between_its_first_model_and_manifest_begins_anew(
    made: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"

    def killed(self: RunFolder, *_: Any) -> None:
        raise ModelError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "complete", killed)
        assert isinstance(play(made, run, monkeypatch).error, ModelError)
    assert (run / "model").is_dir() and (run / "rounds" / "000000" / "party-owner-0.json").is_file()
    assert play(made, run, monkeypatch, resume=True).error is None
    assert "No round" in caplog.text and (run / "rounds" / "000001" / MANIFEST).is_file()


def test_a_place_for_the_model_that_holds_something_else_is_found_before_the_first_round(
    made: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "model" / "config.json").write_text("{}")
    (run / "model" / "thesis.txt").write_text("1")
    scene = play(made, run, monkeypatch)
    assert isinstance(scene.error, UsageError) and str(run / "model" / "thesis.txt") in str(scene.error)
    assert held(run) == {"model/config.json": b"{}", "model/thesis.txt": b"1"} and not scene.rows
