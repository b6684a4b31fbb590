"""The folder of a run."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from splitlm import __version__
from splitlm.telemetry import folder
from splitlm.telemetry.folder import run_folder, versions, write_run, write_whole


def test_the_name_says_when_and_what(tmp_path: Path) -> None:
    made = run_folder(tmp_path / "runs", "generate", "first try")
    assert made.is_dir()
    assert re.fullmatch(r"\d{8}-\d{6}-generate-first-try", made.name)
    assert re.fullmatch(r"\d{8}-\d{6}-demo", run_folder(tmp_path, "demo").name)


def test_two_runs_never_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder.time, "strftime", lambda _: "now")
    made = [run_folder(tmp_path, "demo", "x") for _ in range(3)]
    assert [m.name for m in made] == ["now-demo-x", "now-demo-x.2", "now-demo-x.3"]


@pytest.mark.parametrize("label", ["../../etc", "/abs", "a/b", "..", "a\nb", "é"])
def test_a_label_cannot_leave_the_base(tmp_path: Path, label: str) -> None:
    made = run_folder(tmp_path, "demo", label)
    assert made.parent == tmp_path
    assert re.fullmatch(r"[A-Za-z0-9_=-]+", made.name)


def test_run_json_holds_verb_config_and_versions(tmp_path: Path) -> None:
    path = write_run(tmp_path, "generate", {"cuts": [6, 11], "trace_dir": Path("/x"), "none": None})
    run = json.loads(path.read_text())
    assert path == tmp_path / "run.json"
    assert run["verb"] == "generate"
    assert run["config"] == {"cuts": [6, 11], "trace_dir": "/x", "none": None}
    assert run["versions"]["python"].startswith("3.")
    assert {"torch", "transformers", "msgspec"} <= run["versions"].keys()


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write_whole(path, b"first")
    plain = Path.write_bytes

    def full(self: Path, data: bytes) -> int:
        plain(self, data[:2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    for name in ("run.json", "new.json"):
        with pytest.raises(OSError, match="No space left"):
            write_whole(tmp_path / name, b"second")
    assert [(left.name, left.read_bytes()) for left in tmp_path.iterdir()] == [("run.json", b"first")]


def test_versions_of_what_is_not_installed_are_left_out() -> None:
    assert set(versions(["msgspec", "no-such-library"])) == {"python", "msgspec"}


def test_asking_for_versions_imports_nothing_heavy() -> None:
    code = "import sys; from splitlm.telemetry.folder import versions; versions(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_the_package_version_is_set() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
