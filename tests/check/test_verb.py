"""``splitlm check equivalence``: what it prints, and its exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from splitlm.check import equivalence as room
from splitlm.check.compare import Run, compare
from splitlm.check.equivalence import Case, Equivalence, Outcome, default_cases
from splitlm.cli.main import run
from splitlm.core.errors import UsageError
from splitlm.model.load import ModelFiles
from splitlm.model.text import TextCodec
from tests.tiny import CONTEXT, WINDOW

GOOD = Run([0, 1], [torch.tensor([3.0, 1.0]), torch.tensor([0.0, 0.5])])
NEAR = Run([0, 1], [torch.tensor([3.0, 1.0]), torch.tensor([0.0, 0.5001])])
FAR = Run([0, 0], [torch.tensor([3.0, 1.0]), torch.tensor([0.7, 0.5])])
TIE = Run([0, 0], [torch.tensor([3.0, 1.0]), torch.tensor([0.0, 0.0])])
TIED = Run([0, 1], [torch.tensor([3.0, 1.0]), torch.tensor([0.0, 1e-4])])


def outcome(ring: Run, reference: Run = GOOD, golden: bool | None = None) -> Outcome:
    return Outcome(Case("a fox", (1, 2, 3)), compare(ring, reference), "text", golden)


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_result(*outcomes: Outcome) -> None:
        result = Equivalence(("embedding + block 0", "block 1 + head"), "float32", outcomes)
        monkeypatch.setattr(room, "equivalence", lambda *_, **__: result)

    return set_result


def check(*arguments: str) -> int:
    return run(["check", "equivalence", "model", "--no-trace", *arguments])


def test_equal_runs_pass_and_say_how_equal(verdict: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    verdict(outcome(GOOD))
    assert check() == 0
    out = capsys.readouterr().out
    assert "a fox" in out and "2/2" in out and "bit for bit" in out and "0.0005" in out
    verdict(outcome(GOOD), outcome(NEAR))
    assert check() == 0
    assert "bit for bit" not in capsys.readouterr().out


def test_a_difference_ends_with_1_and_names_the_token(
    verdict: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    verdict(outcome(GOOD), outcome(FAR))
    assert check() == 1
    out, err = capsys.readouterr()
    assert "1/2" in out and "equals the uncut model" not in out
    assert "1 of 2 prompts differ" in err and "at index 1 the ring chose 0 and the reference 1" in err and "KV" in err


def test_an_excused_difference_passes_loudly(verdict: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    verdict(outcome(TIE, TIED))
    assert check() == 0
    out = capsys.readouterr().out
    assert "EXCUSED a fox, index 1: ring chose 0, reference 1" in out and "bit for bit" not in out


def test_another_text_than_the_golden_one_fails(
    verdict: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    verdict(outcome(GOOD, golden=True))
    assert check() == 0
    verdict(outcome(GOOD, golden=False))
    assert check() == 1
    assert "golden" in capsys.readouterr().err


def test_bit_equality_can_be_asked_for() -> None:
    seen = compare(NEAR, GOOD)
    assert Outcome(Case("", ()), seen, "").ok and not Outcome(Case("", ()), seen, "", bits=True).ok
    assert "at index 1 the logits are not bit-equal" in Outcome(Case("", ()), seen, "", bits=True).failure
    assert Outcome(Case("", ()), compare(GOOD, GOOD), "", bits=True).ok


def test_bits_that_differ_from_transformers_alone_have_a_remedy(
    verdict: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Not where the reference is our own stage, and not where more than bits differ."""
    near = Outcome(Case("", ()), compare(NEAR, GOOD), "", bits=True)
    far = Outcome(Case("", ()), compare(FAR, GOOD), "", bits=True)
    hint = "Try --ref-loader shard: transformers' own cache"
    for outcomes, words, told in (
        ((near,), (), True),
        ((near,), ("--ref-loader", "shard"), False),
        ((near, far), (), False),
    ):
        verdict(*outcomes)
        assert check("--bit-equal", *words) == 1
        err = capsys.readouterr().err
        assert "not bit-equal" in err and (hint in err) == told


def test_json_has_one_object_also_when_it_fails(
    verdict: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    verdict(outcome(FAR))
    assert check("--json") == 1
    result = json.loads(capsys.readouterr().out)
    assert not result["ok"] and result["prompts"][0]["first_bad_index"] == 1
    assert result["prompts"][0]["max_delta"] == pytest.approx(0.7)


def test_json_stays_json_where_a_number_is_not_finite(
    verdict: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    verdict(outcome(Run([0, 1], [torch.tensor([3.0, float("nan")]), torch.tensor([0.0, 0.5])])))
    assert check("--json") == 1
    result = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert result["prompts"][0]["max_delta"] is None and result["prompts"][0]["first_bad_index"] == 0


def test_nothing_compared_is_no_success(verdict: Callable[..., None]) -> None:
    verdict()
    assert check() == 1


@pytest.mark.parametrize("wrong", [["--sessions", "0"], ["--ref-loader", "x"], ["--baseline", "x"], ["-n", "0"]])
def test_wrong_options_are_usage_errors(wrong: list[str], verdict: Callable[..., None]) -> None:
    verdict(outcome(GOOD))
    assert check(*wrong) == 2


def test_default_prompts_pass_window_and_chunk_and_fit_the_context(tiny: Callable[[str], Path]) -> None:
    files = ModelFiles(tiny("mistral"))
    codec = TextCodec(files.folder)
    short, long, *more = default_cases(codec, files, 16, 20, 4)
    assert len(short.prompt) < WINDOW * 3 and len(long.prompt) > max(16, WINDOW) and len(more) == 2
    assert len({len(case.prompt) for case in (short, long, *more)}) == 4
    for chunk, new in ((1000, 20), (16, CONTEXT), (16, CONTEXT - 1), (16, 5 * CONTEXT)):
        for case in default_cases(codec, files, chunk, new, 3):
            assert 1 <= len(case.prompt) <= max(CONTEXT - new, CONTEXT // 2)
            assert all(0 <= token < files.vocab for token in case.prompt)


def test_a_golden_text_that_is_not_there_is_told_before_the_ring_starts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="golden"):
        room.equivalence("nothing", golden=tmp_path / "no.txt")


@pytest.mark.parametrize("threads", [1025, 2**40])
def test_more_threads_than_can_be_had_are_a_usage_error(threads: int, tiny: Callable[[str], Path]) -> None:
    before = torch.get_num_threads()
    with pytest.raises(UsageError, match=r"^--threads: "), room.intra_op_threads(threads):
        pytest.fail("it computes")
    with pytest.raises(UsageError, match=r"^--threads: "):
        room.equivalence(str(tiny("llama")), threads=threads)
    assert torch.get_num_threads() == before
