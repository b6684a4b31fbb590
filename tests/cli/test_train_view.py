"""What is told of a training run while it goes on."""

from __future__ import annotations

from typing import Any

import pytest

from splitlm.cli import train_view
from splitlm.cli.console import Console
from splitlm.cli.train_view import TrainView
from splitlm.core.config import RunConfig, read


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every line, however soon it comes after the one before."""
    told: list[str] = []
    monkeypatch.setattr(train_view, "EVERY_S", 0.0)
    monkeypatch.setattr(TrainView, "_line", lambda _, text: told.append(text))
    return told


def config(shape: str) -> RunConfig:
    server = {"architecture": shape, "clients": [2, 1], "global-round": 2, "cut-layers": 1}
    learning = {"control-count": 2, "u-shape": {"microbatches-per-window": 2}}
    return read({"server": server, "learning": learning}, "test")


def window(round_: int, number: int, party: str, loss: float | None, items: int = 2) -> dict[str, Any]:
    return {"round": round_, "window": number, "party": party, "loss": loss, "items": items}


def view(shape: str, *rows: dict[str, Any]) -> None:
    made = TrainView(Console(), config(shape))
    for owner in (0, 1):
        made.record("owner", {"party": f"owner {owner}", "batches": 4})
    for row in rows:
        kind = "window" if "party" in row else "round"
        made.record(kind, row)


def test_the_loss_of_a_window_is_that_of_all_its_owners(lines: list[str]) -> None:
    view(
        "u-shape",
        window(0, 0, "owner 0", 1.0),
        window(0, 0, "worker 0", None),
        window(0, 0, "owner 1", 3.0),
        window(0, 1, "owner 1", 4.0, 6),
        window(0, 1, "owner 0", 2.0),
        {"round": 0, "loss": 2.75},
        window(1, 0, "owner 0", 1.0),
    )
    assert lines == ["window 1 of 4: round 1, loss 2", "window 2 of 4: round 1, loss 3.5", "round 1 of 2: loss 2.75"]


def test_a_run_that_is_gone_on_with_counts_on(lines: list[str]) -> None:
    view("u-shape", window(1, 0, "owner 0", 1.0), window(1, 1, "owner 0", 2.0), {"round": 1, "loss": 1.5})
    assert lines == ["window 3 of 4: round 2, loss 1", "window 4 of 4: round 2, loss 2", "round 2 of 2: loss 1.5"]


def test_owners_that_step_alone_have_windows_of_their_own(lines: list[str]) -> None:
    steps = [window(0, number, f"owner {owner}", 1.0 + owner) for number in (0, 1) for owner in (0, 1)]
    view("two-stage", *steps)
    assert lines == [f"window {n} of 8: round 1, loss {loss}" for n, loss in ((1, 1), (2, 2), (3, 1), (4, 2))]
