"""Where a run leaves its files: what cannot be written leaves nothing half."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from splitlm.cli.runs import RunOptions, keep_result, run_dir
from splitlm.core.errors import UsageError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk on which folders can be made, and files, but nothing written into these."""

    def write_bytes(path: Path, _: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_bytes)


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("folder", [None, Path("new"), Path("a/b/new")])
def test_a_run_on_a_full_disk_leaves_nothing(folder: Path | None, here: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be made .No space left on device.*--trace-dir"):
        run_dir("generate", folder, False, "", {"model": "m"})
    assert list(here.iterdir()) == []


@pytest.mark.usefixtures("full")
def test_what_lay_there_before_stays(here: Path) -> None:
    old = here / "old"
    old.mkdir()
    with pytest.raises(UsageError, match="No space left on device"):
        run_dir("generate", old, False, "", {"model": "m"})
    assert list(old.iterdir()) == []
    (here / "runs").mkdir()
    with pytest.raises(UsageError, match="No space left on device"):
        run_dir("generate", None, False, "", {"model": "m"})
    assert sorted(here.rglob("*")) == [old, here / "runs"]


def test_a_name_that_no_folder_can_have_is_a_paragraph(here: Path) -> None:
    with pytest.raises(UsageError, match="cannot be made"), RunOptions(Path("x" * 300)).folder("generate", {}):
        pytest.fail("it began")
    assert list(here.iterdir()) == []


def test_a_result_is_there_whole_or_not_at_all(here: Path, request: pytest.FixtureRequest) -> None:
    keep_result(None, {})
    keep_result(here, {"a": 1})
    request.getfixturevalue("full")
    with pytest.raises(UsageError, match=r"result cannot be written .No space left on device"):
        keep_result(here, {"a": 2})
    assert [path.name for path in here.iterdir()] == ["result.json"]
    assert json.loads((here / "result.json").read_text()) == {"a": 1}
