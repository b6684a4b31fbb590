"""Rounds that were completed and cannot be used are told apart from a first round that never was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from splitlm.core.errors import CheckpointError
from splitlm.finetune.store import NAMED, RunFolder
from tests.finetune.test_store import WHO, flip, party


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    """A run that is in its first round."""
    with RunFolder(tmp_path / "run", WHO) as folder:
        folder.create({}, {})
        folder.metrics({"record": "owner", "rows": 2})
        folder.metrics({"record": "window", "round": 0})
        yield folder


def lose(run: RunFolder, number: int) -> None:
    """Store a round, and take its manifest away."""
    run.save_round(number, {"a": party(1)})
    (run.path / "rounds" / f"{number:06}" / "manifest.json").unlink()


def with_model(run: RunFolder) -> None:
    (run.path / "model").mkdir()


def half_a_row(run: RunFolder) -> None:
    (run.path / "metrics.jsonl").open("ab").write(b'{"record":"rou\n\xff"round"\n["round"]\n')


@pytest.mark.parametrize("more", [with_model, half_a_row, lambda run: None])
def test_a_first_round_that_was_not_brought_to_its_end_is_none(
    run: RunFolder, more: Callable[[RunFolder], None]
) -> None:
    """Also where its model was written already, which comes before the manifest."""
    assert run.latest() is None
    lose(run, 0)
    more(run)
    assert run.latest() is None


def no_rows(run: RunFolder) -> None:
    with_model(run)
    (run.path / "metrics.jsonl").unlink()


@pytest.mark.parametrize(
    ("trace", "says"),
    [
        (lambda run: run.metrics({"record": "round", "round": 0}), "metrics.jsonl has a round"),
        (lambda run: lose(run, 1), "no rounds/000000/manifest.json and no rounds/000001/manifest.json"),
        (no_rows, "model is here"),
    ],
)
def test_what_shows_that_a_round_was_completed(run: RunFolder, trace: Callable[[RunFolder], None], says: str) -> None:
    lose(run, 0)
    trace(run)
    with pytest.raises(CheckpointError) as caught:
        run.latest()
    text = str(caught.value)
    assert says in text and "manifest" in text and str(run.path / "rounds") in text and "\n" not in text
    assert "Restore" in text and "without --resume" in text


def test_all_that_is_damaged_is_named_up_to_a_number(run: RunFolder) -> None:
    run.save_round(0, {"north": party(1), "south": party(2)})
    for path in run.path.glob("rounds/*/party-*.safetensors"):
        flip(path)
    with pytest.raises(CheckpointError) as caught:
        run.latest()
    for name in ("north", "south"):
        assert f"rounds/000000/party-{name}.safetensors (Its SHA-256" in str(caught.value)
    assert "party-north.json" not in str(caught.value)
    run.save_round(0, {str(number): party(number) for number in range(NAMED + 3)})
    for path in run.path.glob("rounds/*/party-*.safetensors"):
        flip(path)
    with pytest.raises(CheckpointError, match="; and 3 more"):
        run.latest()
