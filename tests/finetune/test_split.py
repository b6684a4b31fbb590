"""Rows spread over owners."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest

from splitlm.core.errors import UsageError
from splitlm.finetune.split import distribute

LABELS = [i % 4 for i in range(400)]
PLAIN: dict[str, Any] = {"non_iid": False, "num_sample": None, "num_label": None, "alpha": 0.5, "seed": 1}


def spread(owners: int, labels: list[int] = LABELS, **options: Any) -> list[list[int]]:
    return distribute(labels, owners, **{**PLAIN, **options})


def classes(share: list[int], labels: list[int] = LABELS) -> Counter[int]:
    return Counter(labels[row] for row in share)


@pytest.mark.parametrize("non_iid", [False, True])
@pytest.mark.parametrize("owners", [1, 3, 7])
def test_every_row_has_one_owner(owners: int, non_iid: bool) -> None:
    shares = spread(owners, non_iid=non_iid)
    assert sorted(row for share in shares for row in share) == list(range(400))
    assert {len(share) for share in shares} <= {400 // owners, -(-400 // owners)}


@pytest.mark.parametrize("non_iid", [False, True])
def test_num_sample_is_rows_per_owner(non_iid: bool) -> None:
    shares = spread(3, num_sample=50, non_iid=non_iid)
    assert [len(share) for share in shares] == [50, 50, 50]
    assert len({row for share in shares for row in share}) == 150


def test_even_owners_have_what_the_data_has() -> None:
    for share in spread(4):
        assert all(10 <= count <= 40 for count in classes(share).values()) and len(classes(share)) == 4


def test_the_smaller_alpha_the_fewer_classes() -> None:
    def largest(alpha: float) -> float:
        shares = [s for seed in range(10) for s in spread(4, non_iid=True, num_sample=40, alpha=alpha, seed=seed)]
        return sum(max(classes(s).values()) / len(s) for s in shares) / len(shares)

    assert largest(0.05) > 0.75 > largest(1) > largest(1000)
    assert 0.25 <= largest(1000) < 0.3


def test_an_alpha_of_nearly_nothing_still_gives_rows() -> None:
    shares = spread(2, non_iid=True, num_sample=20, alpha=1e-9)
    assert [len(share) for share in shares] == [20, 20]
    assert [len(classes(share)) for share in shares] == [1, 1]


def test_classes_that_nobody_drew_are_used_when_the_others_are_gone() -> None:
    labels = [0] * 5 + [1] * 5
    for seed in range(8):
        shares = spread(2, labels, non_iid=True, num_sample=5, alpha=1e-9, seed=seed)
        assert sorted(row for share in shares for row in share) == list(range(10))


def test_the_same_seed_gives_the_same_rows() -> None:
    for non_iid in (False, True):
        first = spread(3, num_sample=20, non_iid=non_iid)
        assert first == spread(3, num_sample=20, non_iid=non_iid)
        assert first != spread(3, num_sample=20, non_iid=non_iid, seed=2)


def test_the_draw_is_the_same_on_every_machine() -> None:
    """Known answers: whoever changes the draw changes every published run."""
    assert spread(2, [0, 1, 2, 0, 1, 2, 0, 1], num_sample=3) == [[0, 6, 5], [2, 4, 7]]
    assert spread(2, [0, 1, 2, 0, 1, 2, 0, 1], num_sample=3, non_iid=True) == [[2, 3, 5], [0, 1, 6]]


def test_rows_that_are_too_few_are_shared_equally(caplog: pytest.LogCaptureFixture) -> None:
    shares = spread(3, [0, 1, 0, 1, 0, 1, 0], num_sample=5, non_iid=True)
    assert sorted(map(len, shares)) == [2, 2, 3]
    assert "num-sample 5: 3 owners share the 7 rows" in caplog.text


def test_an_owner_may_have_no_row(caplog: pytest.LogCaptureFixture) -> None:
    assert sorted(map(len, spread(3, [0, 1]))) == [0, 1, 1]
    assert "owner 2 has no rows" in caplog.text
    assert spread(2, []) == spread(2, num_sample=0) == spread(2, [], non_iid=True) == [[], []]


def test_a_missing_class_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (first, second) = spread(2, [0] * 9 + [5], num_sample=5)
    without = 0 if 9 in second else 1
    assert 9 in (first, second)[1 - without]
    assert f"owner {without} has 5 rows and none of class 5" in caplog.text
    assert f"owner {1 - without} " not in caplog.text


def test_num_label_takes_the_lowest_classes(caplog: pytest.LogCaptureFixture) -> None:
    shares = spread(2, num_label=2, num_sample=80)
    assert {label for share in shares for label in classes(share)} == {0, 1}
    assert caplog.text == ""


def test_more_classes_than_the_data_has_are_clamped(caplog: pytest.LogCaptureFixture) -> None:
    assert spread(2, num_label=9) == spread(2, num_label=4) == spread(2)
    assert caplog.text.count("num-label 9: the data has 4 classes") == 1


def test_a_class_that_runs_out_is_made_up_for() -> None:
    labels = [0] * 95 + [1] * 5
    for seed in range(20):
        shares = spread(2, labels, num_sample=40, non_iid=True, alpha=0.1, seed=seed)
        assert [len(share) for share in shares] == [40, 40]


def test_rows_come_mixed_not_class_by_class() -> None:
    (share,) = spread(1, non_iid=True)
    assert sorted(share, key=lambda row: LABELS[row]) != share
    assert len({LABELS[row] for row in share[:40]}) == 4


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"owners": 0}, "clients is 0"),
        ({"num_sample": -1}, "num-sample is -1"),
        ({"num_label": 0}, "num-label is 0"),
        ({"alpha": 0.0}, "alpha is 0"),
        ({"alpha": float("nan")}, "alpha is nan"),
    ],
)
def test_numbers_out_of_range(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        distribute(LABELS, **{"owners": 2, **PLAIN, **wrong})
