"""What is said before a run that gives away more than it seems to."""

from __future__ import annotations

from typing import Any

import pytest

from splitlm.core.config import RunConfig, read
from splitlm.core.config_cautions import SECOND_DRAW, cautions


def made(owners: int = 2, **fine_tune: Any) -> RunConfig:
    return read({"server": {"clients": [owners, 1]}, "fine-tune": fine_tune})


@pytest.mark.parametrize(
    ("owners", "choice", "frozen"),
    [(1, "auto", False), (2, "auto", True), (1, "on", True), (2, "off", False), (1, True, True), (2, False, False)],
)
def test_embeddings_are_frozen_with_more_than_one_owner_unless_told_otherwise(
    owners: int, choice: object, frozen: bool
) -> None:
    assert made(owners, **{"freeze-embeddings": choice}).frozen_embedding is frozen


def test_unfreezing_with_several_owners_is_warned_of_and_says_why() -> None:
    (said,) = cautions(made(2, **{"freeze-embeddings": False}))
    assert "freeze-embeddings" in said and "tokens" in said
    assert cautions(made(1, **{"freeze-embeddings": False})) == ()  # nobody else's update is there to be read
    assert cautions(made(2)) == ()
    assert cautions(made(2, **{"freeze-embeddings": False, "name": "LoRA"})) == ()  # adapters leave it alone


def test_noise_promises_nothing() -> None:
    (said,) = cautions(read({"privacy": {"noise": 0.1}}))
    assert "0.1" in said and "no guarantee" in said


def test_a_run_that_is_gone_on_with_draws_its_noise_anew_and_says_what_that_costs() -> None:
    noisy = read({"privacy": {"noise": 0.1}})
    assert SECOND_DRAW not in cautions(noisy) and cautions(noisy, resumed=True)[-1] == SECOND_DRAW
    assert cautions(read({}), resumed=True) == ()
