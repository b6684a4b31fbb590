"""What a run writes down: every row, in order, and a disk that fails costs nobody but the rows."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from splitlm.core.errors import SplitlmError
from splitlm.finetune.store import Identity, RunFolder
from splitlm.node.diary import Diary


def test_rows_come_in_order_and_the_folder_is_free_afterwards(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", Identity("m", ()))
    folder.create({"name": "x"}, {"python": "3"})
    told: list[tuple[str, dict[str, Any]]] = []
    diary = Diary(folder, lambda kind, row: told.append((kind, row)))
    for number in range(50):
        diary.record("window", {"window": number})
    diary.record("round", {"round": 0, "loss": 1.5})
    diary.close()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    times = [row.pop("seconds") for row in rows]
    assert times == sorted(times) and times[0] >= 0
    assert rows == [
        *({"record": "window", "window": n} for n in range(50)),
        {"record": "round", "round": 0, "loss": 1.5},
    ]
    assert [kind for kind, _ in told] == ["window"] * 50 + ["round"]
    again = RunFolder(tmp_path / "run", Identity("m", ()))
    again.reopen()  # the lock is free
    again.close()


def test_a_disk_that_fails_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path / "run", Identity("m", ()))
    folder.create({}, {})

    def full(_: object) -> None:
        raise SplitlmError("It cannot be written (no space)")

    monkeypatch.setattr(folder, "metrics", full)
    diary = Diary(folder)
    with caplog.at_level(logging.WARNING, logger="splitlm.train"):
        for number in range(3):
            diary.record("window", {"window": number})
        diary.close()
    assert [r.message for r in caplog.records] == [
        "The metrics cannot be written: It cannot be written (no space).",
        "3 rows of metrics were not written",
    ]


def test_without_a_folder_rows_are_told_and_kept_nowhere() -> None:
    told: list[str] = []
    diary = Diary(None, lambda kind, _: told.append(kind))
    diary.record("round", {})
    diary.close()
    assert told == ["round"]
