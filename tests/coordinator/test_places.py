"""Who gets which number: in the order of arrival, or by the files one has of the round that is gone on with."""

from __future__ import annotations

import math
from typing import Any

import pytest

from splitlm.coordinator.members import Members
from splitlm.coordinator.orders import Orders
from splitlm.coordinator.places import Places
from splitlm.core import training
from splitlm.core.shape import Role, find_shape


class Desk:
    """Where parties register, each under its own name."""

    def __init__(self, stored: list[str], resume: int = 3, owners: int = 3, workers: int = 2) -> None:
        self.members = Members()
        files: dict[str, list[training.SavedFile]] = {name: [] for name in stored}
        orders = Orders(find_shape("u-shape"), owners, workers, 9, {}, "r", resume=resume, stored=files)
        self.places = Places(orders, self.members)

    def come(self, name: str, *kept: str, role: Role = "owner", rounds: tuple[int, ...] = (2, 3)) -> Any:
        """Its number, or why it has none."""
        said = training.Register(role, name, kept={of: list(rounds) for of in kept})
        number = self.places.take(said)
        if number is None:
            return self.places.refusal(said)
        self.members.add(name, number, said)
        return number

    def who(self) -> dict[str, int]:
        return {member.name: member.who[1] for member in self.members}


ALL = ["owner-0", "owner-1", "owner-2", "worker-0", "worker-1"]


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("resume", [-1, 3])
def test_work_is_shared_out_by_no_such_weight(weight: float, resume: int) -> None:
    desk = Desk(ALL, resume=resume)
    said = training.Register("worker", "w", weight, kept={"worker-0": [3]})
    assert desk.places.take(said) is None
    assert f"--compute-weight is {weight}" in desk.places.refusal(said)
    assert desk.come("x", "worker-0", role="worker") == 0


def test_in_a_new_run_numbers_are_given_in_the_order_of_arrival_whatever_lies_in_a_folder() -> None:
    desk = Desk([], resume=-1, owners=2)
    assert [desk.come("a", "owner-1"), desk.come("b", "owner-0"), desk.come("w", role="worker")] == [0, 1, 0]
    assert "no place for another owner: the run has 2" in desk.come("c")


def test_who_comes_back_has_its_own_number_in_whatever_order() -> None:
    desk = Desk(ALL)
    for name, own in (("c", "owner-2"), ("a", "owner-0"), ("y", "worker-1"), ("b", "owner-1"), ("x", "worker-0")):
        desk.come(name, own, role="owner" if own.startswith("owner") else "worker")
    assert desk.who() == {"a": 0, "b": 1, "c": 2, "x": 0, "y": 1}


@pytest.mark.parametrize("order", ["abc", "acb", "bac", "bca", "cab", "cba"])
def test_who_could_be_any_leaves_the_number_to_who_could_not(order: str) -> None:
    """Folders may be shared; ``a`` has one's files, ``b`` two's, ``c`` all."""
    kept = {"a": ["owner-2"], "b": ["owner-1", "owner-2"], "c": ["owner-0", "owner-1", "owner-2"]}
    desk = Desk(ALL)
    for name in order:
        assert isinstance(desk.come(name, *kept[name]), int)
    assert desk.who() == {"a": 2, "b": 1, "c": 0}


def test_who_has_not_the_files_of_the_round_is_turned_away_and_told_which_are_wanted() -> None:
    desk = Desk(ALL)
    text = desk.come("new")
    assert "after round 4" in text and "owner-0, owner-1, owner-2" in text and "nobody" in text and "--folder" in text
    assert desk.come("a", "owner-0") == 0
    text = desk.come("again", "owner-0")  # a copy of its folder, or its old process
    assert "owner-1, owner-2" in text and "those of owner-0" in text
    assert "nobody" in desk.come("late", "owner-1", rounds=(2,))  # of an older round
    assert "nobody" in desk.come("none", "owner-7", rounds=())
    assert desk.who() == {"a": 0}


def test_the_number_of_one_who_was_lost_goes_to_who_has_the_files_of_another_one() -> None:
    desk = Desk(["owner-0", "worker-1"], owners=1)
    assert "worker-1" in desk.come("new", role="worker")
    assert desk.come("x", "worker-1", role="worker") == 0  # where the other one's files stand for those of the lost one
    assert desk.come("y", "worker-1", role="worker") == 1
