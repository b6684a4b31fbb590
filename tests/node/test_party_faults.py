"""What goes wrong in a party's own work, and what it does about workers that are slow, or gone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from splitlm.bus.base import PeerGone
from splitlm.core import messages, training
from splitlm.core.config import RunConfig
from splitlm.core.errors import ModelError, PeerLostError
from splitlm.finetune.party import Party
from splitlm.finetune.plane import Neighbour, Plane
from splitlm.finetune.recipe import Recipe
from splitlm.finetune.window import Out
from splitlm.node import party, tuning
from splitlm.node.aggregator import StateHub
from splitlm.node.partylinks import LinkSettings
from splitlm.node.shelf import Shelf
from splitlm.planner.routing import SmoothWRR
from tests.node.test_training_faults import WORKER, is_
from tests.node.test_tuning import ROWS, config, model_folder, rows_file
from tests.node.training_scene import Who, once, play


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., RunConfig]:
    """Settings of a run of one round over a tiny BERT."""

    def made(workers: int, batch: int = 3, rounds: int = 1, owners: int = 1, **shape: object) -> RunConfig:
        folder, data = model_folder("bert", tmp_path / "model", 0.0), rows_file(tmp_path, "classify")
        settings = {"microbatches-per-window": 3, "timeout-seconds": 30, **shape}
        return config(
            folder,
            data,
            server={"clients": [owners, workers], "global-round": rounds},
            learning={"batch-size": batch, "body-sync": "window", "u-shape": settings},
        )

    return made


def test_weights_follow_speeds_again_once_a_worker_is_lost(
    make: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[dict[int, float]] = []
    reweigh = SmoothWRR.reweigh

    def watched(self: SmoothWRR[int], weights: dict[int, float]) -> None:
        taken.append(dict(weights))
        reweigh(self, weights)

    monkeypatch.setattr(SmoothWRR, "reweigh", watched)
    strike = once(is_("to", WORKER, training.Window, window=0), lambda scene: scene.kill(WORKER))
    scene = play(make(3), tmp_path / "run", monkeypatch, strike)
    assert scene.error is None
    assert taken[0] == {0: 1.0, 2: 1.0}, "it is forgotten at once"
    assert all(weights.keys() == {0, 2} for weights in taken)
    assert taken[-1][0] != 1.0 != taken[-1][2], "measured speeds count"


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_round_begins_with_the_manual_weights(
    adaptive: bool, make: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[dict[int, float]] = []
    measured: list[dict[int, float]] = []
    begin, reweigh = SmoothWRR.__init__, SmoothWRR.reweigh

    def starts(self: SmoothWRR[int], weights: dict[int, float]) -> None:
        begun.append(dict(weights))
        begin(self, weights)

    def watched(self: SmoothWRR[int], weights: dict[int, float]) -> None:
        measured.append(dict(weights))
        reweigh(self, weights)

    monkeypatch.setattr(SmoothWRR, "__init__", starts)
    monkeypatch.setattr(SmoothWRR, "reweigh", watched)
    made = make(2, rounds=2, **{"adaptive-weights": adaptive})
    assert play(made, tmp_path / "run", monkeypatch).error is None
    parties, manual = 3, {0: 1.0, 1: 1.0}
    assert len(begun) == 2 * parties and begun[:parties] == [manual] * parties
    assert begun[parties:] == [manual] * parties and bool(measured) == adaptive


ONE = {"timeout-seconds": 1}


def test_a_long_microbatch_is_not_taken_for_a_dead_worker(
    make: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward and a backward of a worker take twice what a silent party is waited for."""
    made = make(1, batch=ROWS, **ONE)
    scene = play(made, tmp_path / "run", monkeypatch, pace_ms=2000.0)
    assert scene.error is None and scene.repeated() == 0
    assert [row["windows"] for kind, row in scene.rows if kind == "round"] == [1]


def test_a_worker_that_waits_is_not_at_work(
    make: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its link stands still and its control line lives: the window ends, and the run goes on without it."""
    send = Plane.send

    async def stalled(self: Plane, who: Neighbour, out: Out) -> None:
        if who != WORKER:
            await send(self, who, out)

    monkeypatch.setattr(Plane, "send", stalled)
    scene = play(make(2, **ONE), tmp_path / "run", monkeypatch)
    assert scene.error is None and scene.repeated() == 1
    assert [row["party"] for kind, row in scene.rows if kind == "lost"] == ["worker 1"]


@pytest.mark.parametrize("stage", ["build", "save", "take", "average"])
def test_a_long_load_save_or_average_is_not_taken_for_a_dead_party(
    stage: str, make: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of: dict[str, tuple[Any, str]] = {
        "build": (Recipe, "party"),
        "save": (Shelf, "save"),
        "take": (tuning, "load_into"),
        "average": (StateHub, "_average"),
    }
    inner = getattr(*of[stage])

    def slow(*args: Any) -> Any:
        time.sleep(2.0)  # on the compute thread
        return inner(*args)

    monkeypatch.setattr(*of[stage], slow)
    scene = play(make(1, **ONE), tmp_path / "run", monkeypatch)
    assert scene.error is None and scene.repeated() == 0


@pytest.mark.parametrize("who", [("owner", 1), WORKER])
def test_a_computation_that_never_ends_costs_its_party_alone(
    who: Who, make: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says from its timer that it is at work for as long as it lives."""
    forward, release, hung = Party.take_forward, threading.Event(), list[Any]()

    def hangs(self: Party, header: Any, tensors: Any) -> Any:
        if (self.role, self.number) == who and header.window == 2:
            hung.append(header)
            release.wait(50.0)
        return forward(self, header, tensors)

    def strike(scene: Any, way: str, of: Who, message: Any) -> None:
        if way == "from" and of == who and isinstance(message, messages.Trouble | PeerGone):
            release.set()  # that its thread ends, too

    monkeypatch.setattr(Party, "take_forward", hangs)
    monkeypatch.setattr(party, "HUNG", 3)
    scene = play(make(2, owners=2, **ONE), tmp_path / "run", monkeypatch, strike, threads=True)
    assert scene.error is None and len(hung) == 1
    assert 1 <= scene.repeated() <= 2  # the ends of its links may be heard of before its last word
    assert [row["party"] for kind, row in scene.rows if kind == "lost"] == [f"{who[0]} 1"]
    assert {of: error is None for of, error in scene.ends.items()} == {
        (role, number): (role, number) != who for role in ("owner", "worker") for number in (0, 1)
    }
    text = str(scene.ends[who])
    assert "has not ended in 3 s" in text and f"{who[0]} 1, window 1 of round 0" in text and "timeout-seconds" in text


@pytest.mark.parametrize("role", ["owner", "worker"])
@pytest.mark.parametrize("error", [IndexError("label 4711"), RuntimeError("out of memory, label 4711")], ids=str)
def test_an_error_of_torch_is_told_with_its_place_and_quotes_nothing(
    error: Exception, role: str, make: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = Party.take_forward, []

    def bad(self: Party, header: Any, tensors: Any) -> Any:
        if self.role == role and header.index == 1:
            calls.append(1)
            raise error
        return forward(self, header, tensors)

    monkeypatch.setattr(Party, "take_forward", bad)
    scene = play(make(1), tmp_path / "run", monkeypatch)
    text = str(scene.error)
    assert isinstance(scene.error, ModelError) == isinstance(error, IndexError) and calls == [1]
    assert f"{role} 0, window 0 of round 0" in text and "microbatch 1 of owner 0" in text
    assert type(error).__name__ in text and "4711" not in text


@pytest.mark.parametrize("error", [ValueError, MemoryError])
@pytest.mark.parametrize("name", ["step", "open"])
def test_an_error_outside_of_a_microbatch_is_told_too(
    name: str, error: type[Exception], make: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bad(*_: Any, **__: Any) -> Any:
        raise error("label 4711")

    monkeypatch.setattr(Party, name, bad)
    scene = play(make(1), tmp_path / "run", monkeypatch)
    text = str(scene.error)
    assert scene.error is not None and error.__name__ in text and "4711" not in text
    assert " 0, window 0 of round 0" in text


def test_a_party_whose_coordinator_is_gone_says_how_to_go_on(
    make: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone:
        async def close(self) -> None:
            pass

    async def join(*_: object) -> Gone:
        return Gone()

    async def lost(*_: object) -> None:
        raise PeerLostError("The peer was lost", where="the coordinator")

    monkeypatch.setattr(party, "join_star", join)
    monkeypatch.setattr(party, "run_party", lost)
    links = LinkSettings(host="127.0.0.1")
    settings = party.PartySettings("worker", make(1), lambda name, _: Path(name), links)
    with pytest.raises(PeerLostError, match=r"The peer was lost.*splitlm coordinator --resume RUN goes on"):
        asyncio.run(party.join_run(settings, ("127.0.0.1", 1)))
