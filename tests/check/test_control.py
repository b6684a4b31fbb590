"""``splitlm check control``: real processes over TCP; and the check itself can turn red."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from splitlm.check import control
from splitlm.core.barrier import TABLE, step
from tests.cli.command import run


def stand_ins() -> list[int]:
    """Stages of this test's process that still run, stopped ones too."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line, status = (folder / "cmdline").read_bytes(), (folder / "status").read_text()
        except OSError:
            continue
        if b"splitlm.check.stand_in" in line and f"PPid:\t{os.getpid()}\n" in status:
            found.append(int(folder.name))
    return found


def test_many_barriers_agree_and_are_measured() -> None:
    done = run("check", "control", "--no-trace", "--only", "happy", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["ok"] and [f["name"] for f in result["findings"]] == ["happy"]
    figures = result["figures"]
    assert 0 < figures["prestage_p50_ms"] < figures["barrier_p50_ms"] <= figures["barrier_p99_ms"]
    assert figures["stage_p50_ms"] > 0 and 0 < figures["commit_p50_ms"] < figures["barrier_p50_ms"]
    assert stand_ins() == []


def test_stages_import_nothing_of_the_directory_they_run_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "splitlm").mkdir()
    (tmp_path / "splitlm" / "__init__.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    done = run("check", "control", "--no-trace", "--only", "happy")
    assert done.code == 0, done.err


def test_a_refusal_and_a_slow_stage_leave_the_old_epoch_serving() -> None:
    done = run("check", "control", "--no-trace", "--only", "nack")
    assert done.code == 0, done.err
    assert re.search(r"^ok +nack: Node 2 refused: .*; Node 1 did not say READY in time", done.out)
    assert stand_ins() == []


@pytest.mark.slow
def test_stages_and_heads_that_die_or_freeze_are_outlived_and_named() -> None:
    done = run("check", "control", "--no-trace", "--only", "kill", "--ctrl-timeout", "1.5")
    assert done.code == 0, done.out + done.err
    lines = done.out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        *(f"ok     {by} in '{state}'" for by in ("SIGKILL", "SIGSTOP") for state in STATES),
        "ok     head frozen",
        "ok     head gone",
    ]
    assert all("Node 2 " in line and "in state '" in line for line in lines[:8])
    assert all("The head " in line and "state unknown" in line for line in lines[8:])
    assert stand_ins() == []


STATES = ("preparing", "prepared", "committed", "idle")


def test_a_head_that_commits_a_refused_barrier_turns_the_check_red(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = dict(TABLE)
    for which in ("more", "all"):
        key = ("leader", "gathering", "NACK", which)
        wrong[key] = TABLE["leader", "gathering", "READY", which]  # type: ignore[index]
    monkeypatch.setattr("splitlm.coordinator.apply.step", partial(step, table=wrong))
    done = run("check", "control", "--no-trace", "--only", "nack", "--ctrl-timeout", "0.5")
    assert done.code in (1, 3), done.out
    assert stand_ins() == []


def test_a_head_that_waits_too_long_turns_the_check_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitlm.coordinator.coordinator.LEADER_SHARE", 1.5)
    monkeypatch.setattr(control, "DEATHS", (control.Death("SIGSTOP", "committed", ("committing",)),))
    answer = control.check("kill", 0.5)
    assert [f.ok for f in answer.findings] == [False, True, True]
    assert "longer than the control timeout" in answer.findings[0].text
    assert stand_ins() == []


def test_a_check_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [control.Finding("happy", True, "fine", 1.0), control.Finding("nack", False, "Node 1 hangs.", 1.0)]
    monkeypatch.setattr(control, "check", lambda *_: control.Answer(1.0, findings, {}))
    done = run("check", "control", "--no-trace")
    assert done.code == 1
    assert "FAILED nack: Node 1 hangs." in done.out
    assert done.paragraph == "1 of 2 questions about the barrier: nack: Node 1 hangs."


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "sad"], "--only: There is no question 'sad'. Expected happy, nack, kill."),
        (["--ctrl-timeout", "0"], "--ctrl-timeout: It is 0. Expected 0.1 to 3600 seconds."),
    ],
)
def test_what_cannot_be_asked_is_refused(arguments: list[str], says: str) -> None:
    done = run("check", "control", "--no-trace", *arguments)
    assert (done.code, done.paragraph) == (2, says)


def test_neither_the_check_nor_its_stages_load_torch() -> None:
    code = (
        "import sys, splitlm.check.stand_in; from splitlm.cli.main import run;"
        "code = run(['check', 'control', '--no-trace', '--only', 'nack', '--ctrl-timeout', '0.5', '-q']);"
        "print(code, sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr


def test_it_leaves_its_settings_and_its_result_unless_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = control.Answer(1.0, [control.Finding("nack", True, "as it must", 0.1)], {"barrier_p50_ms": 0.5})
    monkeypatch.setattr(control, "check", lambda *_: found)
    monkeypatch.chdir(tmp_path)
    assert run("check", "control", "--no-trace").code == 0
    assert list(tmp_path.iterdir()) == []
    done = run("check", "control", "--only", "nack", "--json")
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "result.json").read_text()) == json.loads(done.out)
    assert json.loads((folder / "run.json").read_text())["config"]["only"] == "nack"
