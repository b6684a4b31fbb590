"""Sampling settings: which are allowed."""

from __future__ import annotations

import math

import msgspec
import pytest

from splitlm.core.errors import UsageError
from splitlm.core.sampling import Sampling


def test_the_defaults_are_greedy_and_need_no_history() -> None:
    assert Sampling().greedy
    assert not Sampling().needs_history
    assert not Sampling(temperature=0.5).greedy
    assert Sampling(repetition_penalty=1.1).needs_history
    assert Sampling(repetition_penalty=0.9).needs_history


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("temperature", [0, 0.7, 100], [-0.1, 101, math.nan, math.inf]),
        ("top_k", [0, 1, 50], [-1]),
        ("top_p", [0.01, 1], [0, 1.01, -1, math.nan]),
        ("min_p", [0, 0.5, 1], [-0.01, 1.01, math.nan]),
        ("repetition_penalty", [0.5, 1.3, 100], [0, -1, 101, math.nan]),
        ("seed", [None, 0, 2**63 - 1], [-1, 2**63]),
    ],
)
def test_ranges(field: str, good: list[float], bad: list[float]) -> None:
    for value in good:
        assert getattr(Sampling(**{field: value}), field) == value
    for value in bad:
        with pytest.raises(UsageError, match=f"--{field.replace('_', '-')}: .*Expected") as caught:
            Sampling(**{field: value})
        assert caught.value.exit_code == 2


def test_a_peers_settings_are_checked_on_arrival() -> None:
    assert msgspec.json.decode(b'{"temperature": 0.5}', type=Sampling) == Sampling(temperature=0.5)
    for bad in (b'{"temperature": -1}', b'{"top_k": 1.5}', b'{"seed": "x"}'):
        with pytest.raises((UsageError, msgspec.ValidationError)):
            msgspec.json.decode(bad, type=Sampling)
