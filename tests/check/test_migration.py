"""``splitlm check migration``, and ``check equivalence`` with a move: what they print, and their exit codes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from splitlm.cli.main import run
from splitlm.migrate.arrivals import Arrivals
from splitlm.model.cache import BlockKV

pytestmark = pytest.mark.usefixtures("forks")


def check(model: Path, *arguments: str) -> int:
    return run(["check", "migration", str(model), "--no-trace", "--tokens", "8", "--shift-at", "3", *arguments])


def test_every_move_of_a_cut_in_one_process(tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tiny("gemma3"), "--cuts", "1,3", "--shift-at", "5") == 0
    out = capsys.readouterr().out
    assert out.count("8/8") == 6 and "bit for bit" in out and "boundary 2 by -1 at token 5" in out


def test_the_cut_is_the_one_that_a_ring_would_take(
    tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A vocabulary that costs as much as some blocks: the last stage holds fewer of them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(tiny("llama"), tmp_path, dirs_exist_ok=True)
    config = AutoConfig.from_pretrained(tmp_path)
    config.vocab_size = 32768
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert run(["plan", str(tmp_path), "--stages", "2", "--json", "-q"]) == 0
    planned = [stage["segments"] for stage in json.loads(capsys.readouterr().out)["stages"]]
    assert check(tmp_path, "--stages", "2", "--json", "-q") == 0
    assert json.loads(capsys.readouterr().out)["cut"] == planned
    assert planned[0] == "embedding + blocks 0–3"


def test_moves_that_the_text_did_not_reach_are_no_success(
    stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The context ends before the token at which they were due."""
    shutil.copytree(stories, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    arguments = [
        "check",
        "migration",
        str(tmp_path),
        "--no-trace",
        "--tokens",
        "60",
        "--shift-at",
        "30",
        "--stages",
        "2",
    ]
    assert run([*arguments, "--prompt", "Once"]) == 1
    err = capsys.readouterr().err
    assert "nothing was checked: 1 of 1 moves did not happen: the texts ended before" in err


def test_json_and_private_cuts_of_two_stages(tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tiny("llama"), "--stages", "2", "--private", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] and len(result["cases"]) >= 3
    assert all(case["kv_bytes"] == case["kv_due"] > 0 and case["bit_equal"] for case in result["cases"])
    assert all(case["at"] == 3 for case in result["cases"])


def test_a_row_that_is_lost_on_the_way_ends_with_1(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pick = Arrivals.pick

    def wrong(held: Arrivals, block: int) -> dict[int, BlockKV]:
        found = pick(held, block)
        for kv in found.values():
            kv._start, kv._rows = kv._start + 1, kv._rows - 1
        return found

    monkeypatch.setattr(Arrivals, "pick", wrong)
    assert check(tiny("llama"), "--cuts", "2,3") == 1
    err = capsys.readouterr().err
    assert "boundary 1 by -1 at token 3" in err and "logits differ from index" in err


@pytest.mark.parametrize(
    "wrong",
    [
        ["--shift-at", "8"],
        ["--shift-at", "0"],
        ["--tokens", "1"],
        ["--cuts", "9"],
        ["--stages", "1"],
        ["--threads", "0"],
        ["--threads", "1025"],
        ["--threads", "99999999999"],
    ],
)
def test_wrong_options_are_usage_errors(wrong: list[str], tiny: Callable[[str], Path]) -> None:
    assert check(tiny("llama"), *wrong) == 2


def test_a_ring_that_moves_a_block_equals_the_one_that_does_not(
    tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["check", "equivalence", str(tiny("llama")), "--cuts", "2,3", "--no-trace", "--prompt", "A fox"]
    arguments += ["-n", "45", "--shift-at", "25", "--shift-k", "-1", "--baseline", "noshift", "--json"]
    assert run(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    (moved,) = result["moves"]
    seen = result["prompts"][0]["prompt_tokens"] + 40 - 1
    assert moved["token"] == 40 and moved["blocks"] == [1] and (moved["source"], moved["target"]) == (0, 1)
    assert moved["kv_bytes"] == moved["kv_due"] == seen * 2 * 2 * 16 * 4
    assert result["prompts"][0]["bit_equal"] and result["baseline"] == "noshift"


def test_a_move_that_does_not_happen_is_no_success(
    tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["check", "equivalence", str(tiny("llama")), "--cuts", "2,3", "--no-trace", "--prompt", "A fox"]
    assert run([*arguments, "-n", "10", "--shift-at", "25", "--shift-k", "-1"]) == 1
    assert "1 of 1 moves did not happen" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["migration", "--tokens", "8", "--shift-at", "3"], ["equivalence", "-n", "3"]])
def test_a_check_leaves_its_settings_and_its_result(
    words: list[str], tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    model = str(tiny("llama"))
    assert run(["check", *words, model, "--cuts", "2,3", "--trace-dir", str(folder), "--json", "-q"]) == 0
    assert json.loads((folder / "result.json").read_text()) == json.loads(capsys.readouterr().out)
    assert json.loads((folder / "run.json").read_text())["config"]["model"] == model
