"""What the rows of a training run add up to."""

from __future__ import annotations

from typing import Any

import pytest

from splitlm.telemetry.train_summary import TrainRows


def window(round_: int, number: int, party: str, loss: float | None, items: int) -> tuple[str, dict[str, Any]]:
    return "window", {"round": round_, "window": number, "party": party, "loss": loss, "items": items}


def round_(number: int, loss: float | None, samples: int = 10, **more: Any) -> tuple[str, dict[str, Any]]:
    return "round", {"round": number, "windows": 2, "repeated": number, "samples": samples, "loss": loss, **more}


def party(number: int, name: str, **values: float) -> tuple[str, dict[str, Any]]:
    return "party", {"round": number, "party": name, **values}


def rows(*given: tuple[str, dict[str, Any]]) -> TrainRows:
    made = TrainRows()
    for kind, row in given:
        made.add(kind, row)
    return made


def test_rounds_add_up_and_the_loss_is_that_of_the_first_and_the_last() -> None:
    made = rows(
        window(0, 0, "owner 0", 9.0, 4),
        round_(0, 2.0, 10, valid_loss=1.5, accuracy=0.25),
        window(1, 0, "owner 0", 8.0, 4),
        round_(1, 1.0, 6, valid_loss=1.25, accuracy=0.5),
        ("lost", {"party": "worker 1", "reason": "gone"}),
        ("something", {"new": 1}),
    )
    found = made.summary(4.0)
    assert (found.rounds, found.windows, found.repeated, found.samples) == (2, 4, 1, 16)
    assert (found.loss_first, found.loss_last, found.samples_per_s) == (2.0, 1.0, 4.0)
    assert found.scores == {"valid_loss": 1.25, "accuracy": 0.5}
    assert found.scores_first == {"valid_loss": 1.5, "accuracy": 0.25}
    assert found.lost == ["worker 1"]


def test_one_round_tells_its_first_and_its_last_window() -> None:
    made = rows(
        window(0, 0, "owner 0", 3.0, 1),
        window(0, 0, "owner 1", 1.0, 3),
        window(0, 0, "worker 0", None, 0),
        window(0, 1, "owner 0", 1.25, 2),
        round_(0, 1.4),
    )
    assert made.window_loss(0, 0) == pytest.approx(1.5) and made.window_loss(0, 7) is None
    found = made.summary(1.0)
    assert (found.loss_first, found.loss_last) == (pytest.approx(1.5), 1.25)


def test_a_partys_newest_figures_count_and_bytes_count_once() -> None:
    """What one party sends on a lane comes to another; only the aggregator's own sending is seen from one side."""
    made = rows(
        party(0, "owner 0", activation_bytes_out=1, compute_s=0.5),
        party(1, "owner 0", activation_bytes_out=10, gradient_bytes_in=5, state_bytes_out=3, state_bytes_in=2),
        party(1, "worker 0", activation_bytes_in=10, gradient_bytes_out=5, peak_live=2, compute_s=1.5, wait_s=0.25),
    )
    found = made.summary(1.0)
    assert found.bytes_by_lane == {"activation": 10, "gradient": 5, "state": 5}
    owner, worker = found.parts
    assert (owner.party, owner.compute_s, owner.bytes_in["gradient"]) == ("owner 0", 0.0, 5)
    assert (worker.party, worker.peak_live, worker.compute_s, worker.wait_s) == ("worker 0", 2, 1.5, 0.25)


def test_a_run_that_ended_at_once_has_a_summary_too() -> None:
    found = rows().summary(0.0)
    assert (found.rounds, found.loss_first, found.loss_last, found.samples_per_s, found.scores) == (
        0,
        None,
        None,
        0,
        {},
    )
