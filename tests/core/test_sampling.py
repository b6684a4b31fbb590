"""Sampling settings: which are allowed."""

from __future__ import annotations

import math
from fractions import Fraction

import msgspec
import numpy as np
import pytest
import torch

from splitlm.core.errors import UsageError
from splitlm.core.sampling import Sampling, real, shown, whole


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


@pytest.mark.parametrize(
    ("field", "given", "plain"),
    [
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", np.float64(0.8), 0.8),
        ("temperature", 1, 1.0),
        ("top_p", np.float16(0.5), 0.5),
        ("min_p", Fraction(1, 4), 0.25),
        ("repetition_penalty", np.int32(2), 2.0),
        ("top_k", np.uint8(5), 5),
        ("seed", np.int64(3), 3),
        ("seed", torch.tensor(4), 4),
    ],
)
def test_numbers_of_other_types_become_plain_ones(field: str, given: object, plain: float) -> None:
    """A frame carries no others, and one that cannot be written would break the ring for all."""
    made = Sampling(**{field: given})  # type: ignore[arg-type]
    assert getattr(made, field) == plain
    assert type(getattr(made, field)) is type(plain)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Sampling) == made


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("temperature", True),
        ("temperature", "1"),
        ("temperature", None),
        ("temperature", 10**400),
        ("temperature", 1j),
        ("top_k", 2.5),
        ("top_k", 2.0),
        ("top_k", True),
        ("top_k", np.bool_(True)),
        ("top_k", 10**30),
        ("top_k", 2**63),
        ("top_p", np.array([0.5])),
        ("min_p", "0"),
        ("repetition_penalty", False),
        ("seed", 1.5),
        ("seed", "7"),
        ("seed", False),
        ("seed", torch.tensor([1, 2])),
    ],
)
def test_what_no_frame_could_carry_is_refused_at_once(field: str, bad: object) -> None:
    with pytest.raises(UsageError, match=f"^--{field.replace('_', '-')}: .* is .*Expected") as caught:
        Sampling(**{field: bad})  # type: ignore[arg-type]
    assert len(str(caught.value)) < 250


def test_a_number_of_more_digits_than_python_writes_is_refused_too() -> None:
    with pytest.raises(UsageError, match="thousands of digits"):
        Sampling(top_k=10**5000)


def test_a_copy_is_checked_too() -> None:
    with pytest.raises(UsageError, match="--seed"):
        msgspec.structs.replace(Sampling(), seed=0.5)
    assert msgspec.structs.replace(Sampling(), seed=np.int64(5)) == Sampling(seed=5)


def test_plain_numbers() -> None:
    assert [whole(value) for value in (3, -1, np.int8(7), 1.0, True, "1", None)] == [3, -1, 7, None, None, None, None]
    assert [real(value) for value in (3, 0.5, np.float32(2), True, "1", None)] == [3.0, 0.5, 2.0, None, None, None]
    assert (shown(np.float64(0.5)), shown("a"), len(shown("a" * 1000))) == ("0.5", "'a'", 60)


def test_a_peers_settings_are_checked_on_arrival() -> None:
    assert msgspec.json.decode(b'{"temperature": 0.5}', type=Sampling) == Sampling(temperature=0.5)
    for bad in (b'{"temperature": -1}', b'{"top_k": 1.5}', b'{"seed": "x"}'):
        with pytest.raises((UsageError, msgspec.ValidationError)):
            msgspec.json.decode(bad, type=Sampling)
