"""What a training run and an export do to files that are not theirs: nothing."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from splitlm.model import checkpoint
from splitlm.model.checkpoint import new_folder

from .command import ROOT, Done, run

CONFIG = ROOT / "configs" / "demo-ushape.yaml"
MISSING = ("--set", "server.model-path=/nonexistent/model")


def train(folder: Path, config: Path = CONFIG) -> Done:
    """A run that cannot begin."""
    done = run("train", config, "--local", "--folder", folder, *MISSING)
    assert done.code == 4 and "/nonexistent/model" in done.paragraph, done.err
    return done


def test_a_run_that_never_began_takes_away_only_its_own_files(tmp_path: Path) -> None:
    folder = tmp_path / "settings"
    folder.mkdir()
    for name in ("exp.yaml", "notes.log", "owner-0.log", "settings.yaml"):
        (folder / name).write_text(CONFIG.read_text() if name == "exp.yaml" else name)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    train(folder, folder / "exp.yaml")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (folder / "coordinator.log").write_text("of an earlier run\n")
    train(folder, folder / "exp.yaml")
    assert (folder / "coordinator.log").read_text().startswith("of an earlier run\n")


def test_a_folder_that_was_there_stays_and_a_new_one_goes(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    train(tmp_path / "empty")
    train(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"] and not list((tmp_path / "empty").iterdir())


def test_a_coordinator_that_nobody_joins_leaves_other_files_alone(tmp_path: Path) -> None:
    (tmp_path / "exp.yaml").write_text("x")
    done = run("coordinator", CONFIG, "--folder", tmp_path, "--set", "log_path=x", *MISSING)
    assert done.code == 4, done.err
    assert [path.name for path in tmp_path.iterdir()] == ["exp.yaml"]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A run's folder with a model."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("{}")
    with new_folder(folder / "model") as model:
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (model / name).write_text(name)
    return folder


def test_an_export_replaces_no_project_that_has_a_config(made: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    for name in ("config.json", "src/main.py", "thesis.txt"):
        (project / name).write_text(name)
    done = run("export", made, "--to", project)
    assert done.code == 2 and f"{project / 'src'}: " in done.paragraph and "Choose another folder" in done.paragraph
    assert all((project / name).read_text() == name for name in ("config.json", "src/main.py", "thesis.txt"))
    for _ in range(2):  # its own output it does replace
        assert run("export", made, "--to", tmp_path / "out").code == 0
    assert len(list((tmp_path / "out").iterdir())) == 3


def test_an_export_to_a_full_disk_is_no_checks_answer(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "flush", full)
    done = run("export", made, "--to", tmp_path / "out")
    assert done.code == 4 and "No space left on device" in done.paragraph
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
