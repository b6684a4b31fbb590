"""Stages as children: what is known of their end, and that none is left."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from splitlm.core.errors import ModelError, NetworkError, UsageError
from splitlm.node.processes import StageProcess, end_all, fresh_folder, start_stages
from splitlm.node.settings import RingSettings

Start = Callable[..., StageProcess]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    """``start(script)``: a child that runs this shell script in place of a stage."""

    def begin(script: str, log: Path | None = None) -> StageProcess:
        shell = tmp_path / f"stage{len(list(tmp_path.glob('*.sh')))}.sh"  # the one before may not have read its own
        shell.write_text(f"#!/bin/sh\n{script}\n")
        shell.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(shell))
        return StageProcess([], log=log, environment={"SPLITLM_TOKEN": "t"})

    return begin


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("script", "kind", "says"),
    [
        ("echo noise; echo 'splitlm: x: It is missing. Try again.' >&2; exit 4", ModelError, "^x: It is missing. Try"),
        ("echo 'splitlm: first' ; echo 'splitlm: last'; echo after; exit 3", NetworkError, "^last.$"),
        ("echo one; echo two; echo three; echo four; exit 3", NetworkError, "^two three four.$"),
        ("exit 3", NetworkError, "ended with exit code 3"),
        ("exit 0", NetworkError, "ended with exit code 0"),
        ("kill -9 $$", NetworkError, "was ended by SIGKILL"),
        ("kill -SEGV $$", NetworkError, "was ended by SIGSEGV"),
    ],
)
@pytest.mark.parametrize("kept", [True, False])
def test_why_it_ended(script: str, kind: type[Exception], says: str, kept: bool, start: Start, tmp_path: Path) -> None:
    process = start(script, tmp_path / "log" if kept else None)
    assert process.wait(20)
    failure = process.failure()
    assert type(failure) is kind
    with pytest.raises(kind, match=says):
        raise failure
    process.end()


def test_while_it_runs_nothing_is_known_and_its_words_are_read_without_disturbing_it(start: Start) -> None:
    process = start("echo a; read x < /dev/null; sleep 0.2; echo 'splitlm: b'; exit 3")
    while not process._last_words():
        time.sleep(0.01)
    assert process.failure() is None
    assert process.fate() == ""
    assert not process.wait(0)
    assert process.wait(20)
    assert str(process.failure()) == "b."
    process.end()
    process.end()
    assert process.exit_code == 3


def test_a_log_without_a_name_is_gone_with_its_process_however_that_ends(start: Start) -> None:
    process = start("echo a; exec sleep 60")
    while not process._last_words():
        time.sleep(0.01)
    assert str(Path(f"/proc/{process.pid}/fd/1").readlink()).endswith("(deleted)")
    process.end()
    assert gone(process.pid)


@pytest.mark.parametrize("script", ["exec sleep 60", "trap '' TERM INT HUP; while :; do sleep 1; done"])
def test_one_that_does_not_stop_is_killed_and_reaped(script: str, start: Start) -> None:
    process = start(script)
    end_all([process], grace=0.05)
    assert process.exit_code == -signal.SIGKILL
    assert gone(process.pid)


def test_one_that_was_stopped_by_a_signal_is_killed_too(start: Start) -> None:
    process = start("exec sleep 60")
    os.kill(process.pid, signal.SIGSTOP)
    end_all([process], grace=0.05)
    assert gone(process.pid)


def test_those_that_stop_in_time_keep_their_exit_codes(start: Start) -> None:
    processes = [start("sleep 0.1; exit 0"), start("sleep 0.1; exit 3")]
    end_all(processes, grace=20)
    assert [process.exit_code for process in processes] == [0, 3]


def test_a_log_that_cannot_be_written_is_an_error_of_ours(start: Start, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="log cannot be written"):
        start("exit 0", tmp_path / "absent" / "log")


def test_a_process_that_cannot_be_started_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(NetworkError, match=r"/nonexistent/python: A stage process could not be started \(No such file"):
        StageProcess([], log=None, environment={})


def test_all_are_started_or_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pids: list[int] = []

    def fails(*args: object, **options: object) -> StageProcess:
        if len(pids) == 2:
            raise NetworkError("No more processes")
        process = real(["--help"], log=None, environment={})
        pids.append(process.pid)
        return process

    real = StageProcess
    monkeypatch.setattr("splitlm.node.processes.StageProcess", fails)
    settings = RingSettings(model="m", folder=tmp_path)
    with pytest.raises(NetworkError, match="No more processes"):
        start_stages(settings, 1, 3)
    assert len(pids) == 2
    assert all(map(gone, pids))


def test_a_trace_folder_that_cannot_be_made_or_cleared_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="folder cannot be made"):
        fresh_folder(tmp_path / "file" / "runs")

    def closed(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    (tmp_path / "trace-node1.jsonl").write_text("")
    monkeypatch.setattr(Path, "unlink", closed)
    with pytest.raises(UsageError, match=r"trace-node1\.jsonl.*Permission denied"):
        fresh_folder(tmp_path)
