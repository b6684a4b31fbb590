"""A party that is lost costs the window and nothing else: what is left is as if the window had been whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from splitlm.core import messages, training
from splitlm.core.config import RunConfig
from splitlm.core.errors import ModelError, PeerLostError
from splitlm.finetune.party import Party
from splitlm.finetune.recipe import OwnerData, open_recipe, read_rows
from splitlm.model.uncut_train import UncutTrainer
from tests.node.test_tuning import config, model_folder, rows_file, uncut
from tests.node.training_scene import Scene, Who, once, play, weights

WINDOW = {"body-sync": "window"}
Place = tuple[Path, RunConfig]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Place]:
    """Settings of a run of two rounds over a tiny BERT with dropout."""

    def made(owners: int, workers: int, learning: dict[str, Any] | None = None, **server: Any) -> Place:
        folder = model_folder("bert", tmp_path / "model", 0.2)
        data = rows_file(tmp_path, "classify")
        return folder, config(
            folder, data, server={"clients": [owners, workers], **server}, learning={**WINDOW, **(learning or {})}
        )

    return made


def close(run: Path, made: RunConfig, whole: UncutTrainer, owner: str = "owner-0", worker: str = "worker-0") -> None:
    """The weights after the last round are those of the uncut loop."""
    for party, expected in ((owner, whole.own[0]), (worker, whole.body)):
        found = weights(run, made, party)
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name].detach(), rtol=0, atol=1e-9)


def is_(way: str, who: Who, kind: type, **fields: Any) -> Callable[[str, Who, Any], bool]:
    """A message of this kind to or from this party."""
    return lambda w, of, m: (
        w == way
        and of == who
        and isinstance(m, kind)
        and all(getattr(m, field) == value for field, value in fields.items())
    )


WORKER: Who = ("worker", 1)
MOMENTS = {
    "before the plan": is_("to", WORKER, training.Window, round=1, window=1),
    "when all have planned": is_("to", WORKER, training.Opened, seq=4),
    "after READY": is_("from", WORKER, messages.Prepared, seq=3),
    "at COMMIT": is_("to", WORKER, messages.Commit, seq=3),
    "after DONE": is_("from", WORKER, messages.Done, seq=3),
    "at the round's end": is_("to", WORKER, training.Gather, round=0),
    "after its average": is_("from", WORKER, training.Saved, round=0),
    "in the last gather": is_("to", WORKER, training.Gather, round=1),
}


@pytest.mark.parametrize(("moment", "links_first"), [(m, i % 2 == 1) for i, m in enumerate(MOMENTS)])
def test_a_lost_worker_costs_the_window_alone(
    moment: str, links_first: bool, make: Callable[..., Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, made = make(1, 2)
    strike = once(MOMENTS[moment], lambda scene: scene.kill(WORKER, links_first=links_first))
    scene = play(made, tmp_path / "run", monkeypatch, strike)
    assert scene.error is None and scene.killed == {WORKER}
    assert [row["party"] for kind, row in scene.rows if kind == "lost"] == ["worker 1"]
    assert scene.ends["owner", 0] is None and scene.ends["worker", 0] is None
    close(tmp_path / "run", made, uncut(made, folder))
    assert [row["samples"] for kind, row in scene.rows if kind == "round"] == [40, 40]


@pytest.mark.parametrize("owners", [1, 2])
def test_a_worker_lost_with_graphs_in_it(
    owners: int, make: Callable[..., Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had computed comes to nobody; what others sent for the attempt comes too late, and changes nothing."""
    folder, made = make(owners, 3)
    scenes: list[Scene] = []
    seen: list[int] = []
    forward = Party.take_forward

    def killing(self: Party, header: Any, tensors: Any) -> Any:
        if self.role == "worker" and header.round == 0 and header.window == 2:
            seen.append(self.number)
            if len(seen) == 2:
                scene = scenes[0]
                scene._loop.call_soon_threadsafe(scene.kill, ("worker", self.number))  # type: ignore[attr-defined]
        return forward(self, header, tensors)

    def catch(scene: Scene, *_: Any) -> None:
        import asyncio

        if not scenes:
            scenes.append(scene)
            scene._loop = asyncio.get_running_loop()  # type: ignore[attr-defined]

    monkeypatch.setattr(Party, "take_forward", killing)
    scene = play(made, tmp_path / "run", monkeypatch, catch)
    assert scene.error is None and len(scene.killed) == 1 and scene.repeated() >= 1
    left = next(n for n in range(3) if ("worker", n) not in scene.killed)
    close(tmp_path / "run", made, uncut(made, folder), worker=f"worker-{left}")


def without_owner(made: RunConfig, folder: Path, gone: int, round_: int, window: int) -> UncutTrainer:
    """The uncut loop of two owners, one of whom leaves before this window."""
    rows = read_rows(made, "train")
    recipe = open_recipe(made, folder, rows.num_labels, dtype="float64")
    data = [OwnerData(recipe, number, rows, None) for number in range(2)]
    whole = UncutTrainer(
        recipe.files,
        recipe.shape,
        recipe.segments,
        recipe.goal,
        recipe.how,
        owners=2,
        seed=made.server.random_seed,
        frozen_embedding=recipe.frozen_embedding,
    )
    most = made.learning.u_shape.microbatches_per_window
    for r in range(made.server.global_round):
        batches = [of.round(r) for of in data]
        here = [o for o in range(2) if o != gone or r < round_]
        for number in range(max(-(-len(b) // most) for b in batches)):
            both = [o for o in range(2) if o != gone or (r, number) < (round_, window)]
            part = {o: batches[o][number * most : (number + 1) * most] for o in both}
            if any(part.values()):
                whole.window(r, number, part)
        whole.average([sum(m.samples for m in b) if o in here else 0 for o, b in enumerate(batches)])
    return whole


@pytest.mark.parametrize(
    ("kind", "links_first"), [("plan", False), ("forwards", True), ("ready", False), ("ready", True), ("commit", True)]
)
def test_a_lost_owner_leaves_the_round_and_its_samples_are_not_counted(
    kind: str, links_first: bool, make: Callable[..., Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, made = make(2, 1)
    who: Who = ("owner", 1)
    when, window = {
        "plan": (is_("to", who, training.Window, round=1, window=1), 1),
        "forwards": (is_("to", who, training.Opened, seq=6), None),
        "ready": (is_("from", who, messages.Prepared, seq=2), None),
        "commit": (is_("to", who, messages.Commit, seq=2), None),
    }[kind]
    at: list[tuple[int, int]] = []
    last: list[training.Window] = []

    def strike(scene: Scene, way: str, of: Who, message: Any) -> None:
        if isinstance(message, training.Window):
            last.append(message)
        if not at and when(way, of, message):
            at.append((last[-1].round, last[-1].window))
            scene.kill(who, links_first=links_first)

    scene = play(made, tmp_path / "run", monkeypatch, strike)
    assert scene.error is None and scene.killed == {who} and (window is None or at[0][1] == window)
    round_, number = at[0]
    # After COMMIT nobody is asked back: the others step with what the lost one had given. Its READY may bring it about.
    committed = scene.repeated() == 0
    assert committed == (kind == "commit") or kind == "ready"
    close(tmp_path / "run", made, without_owner(made, folder, 1, round_, number + committed))
    rows = [row for k, row in scene.rows if k == "round"]
    assert [row["samples"] for row in rows] == [20 if row["round"] >= round_ else 40 for row in rows]


def test_an_owner_lost_when_the_others_have_nothing_left(
    make: Callable[..., Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt that follows has nothing to do, and what was said of the one before comes after the round's end."""
    _, made = make(2, 2)
    who: Who = ("owner", 1)
    plans: dict[int, int] = {}

    def strike(scene: Scene, way: str, of: Who, message: Any) -> None:
        if isinstance(message, training.Plan):
            plans[of[1]] = message.left
        # The last window with work, in which both have their last microbatches.
        ready = way == "from" and of[0] == "worker" and isinstance(message, messages.Prepared)
        if ready and not scene.killed and all(left == 0 for left in plans.values()):
            scene.kill(who, links_first=True)

    scene = play(made, tmp_path / "run", monkeypatch, strike)
    assert scene.error is None and scene.killed == {who}


@pytest.mark.parametrize(("who", "sync"), [(("worker", 0), "window"), (("owner", 0), "round")])
def test_the_last_of_its_role_ends_the_run_in_one_paragraph(
    who: Who, sync: str, make: Callable[..., Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, made = make(1, 1, {"body-sync": sync})
    scene = play(
        made, tmp_path / "run", monkeypatch, once(is_("from", who, messages.Prepared, seq=2), lambda s: s.kill(who))
    )
    assert isinstance(scene.error, PeerLostError) and scene.error.exit_code == 3
    text = str(scene.error)
    assert text.startswith(f"{who[0]} 0 (") and f"no {who[0]} is left" in text and "--resume" in text
    other: Who = ("owner", 0) if who[0] == "worker" else ("worker", 0)
    end = scene.ends[other]
    assert end is not None and end.exit_code == 3  # it was told to stop, and why
    assert "The run ended early: " in str(end) and f"no {who[0]} is left" in str(end)


def test_a_run_that_was_stopped_is_no_success_to_its_parties(
    make: Callable[..., Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Ctrl-C at the coordinator: it lives long enough to say so, whatever parties were at."""
    _, made = make(1, 1)
    for moment in (is_("to", ("owner", 0), training.Opened, seq=2), is_("to", ("owner", 0), training.Gather, round=0)):
        run = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        scene = play(made, run, monkeypatch, once(moment, Scene.interrupt))
        assert {error.exit_code for error in scene.errors} == {3} and len(scene.errors) == 2


def test_what_one_party_fails_with_is_the_others_network_trouble(
    make: Callable[..., Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model at fault at one of them is no fault of another one's model."""
    _, made = make(1, 2)
    monkeypatch.setattr(Party, "take_backward", lambda *_: (_ for _ in ()).throw(ModelError("not finite", where="x")))
    scene = play(made, tmp_path / "run", monkeypatch)
    assert isinstance(scene.error, ModelError) and scene.error.exit_code == 4
    assert len(scene.errors) == 3 and {error.exit_code for error in scene.errors} == {3}
    assert all("The run ended early: " in str(error) and "not finite" in str(error) for error in scene.errors)


@pytest.mark.parametrize("kind", [training.Start, training.Peers])
def test_a_party_lost_before_anything_began_ends_the_run(
    kind: type, make: Callable[..., Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, made = make(2, 2)
    strike = once(is_("to", ("worker", 1), kind), lambda scene: scene.kill(("worker", 1)))
    scene = play(made, tmp_path / "run", monkeypatch, strike)
    assert isinstance(scene.error, PeerLostError)
    assert str(scene.error).startswith("worker 1 (") and "before the run began" in str(scene.error)


def test_a_cut_link_costs_the_worker_whom_the_owner_cannot_reach(
    make: Callable[..., Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for moment in (
        is_("to", ("owner", 0), training.Opened, seq=2),
        is_("from", WORKER, messages.Prepared, seq=2),
        is_("to", WORKER, messages.Commit, seq=2),
        is_("to", ("owner", 0), training.Gather, round=0),
    ):
        folder, made = make(1, 2)
        run = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        scene = play(made, run, monkeypatch, once(moment, lambda scene: scene.cut(0, 1)))
        assert scene.error is None
        assert [row["party"] for kind, row in scene.rows if kind == "lost"] == ["worker 1"]
        end = scene.ends[WORKER]
        assert end is not None and "cannot reach it" in str(end)  # it lives, and is told why it is out
        close(run, made, uncut(made, folder))


def test_a_replica_that_drifts_is_lost_with_what_it_learned_and_the_log_says_so(
    make: Callable[..., Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, made = make(1, 2, {"body-sync": "round"})
    strike = once(is_("to", WORKER, training.Window, round=0, window=2), lambda scene: scene.kill(WORKER))
    scene = play(made, tmp_path / "run", monkeypatch, strike)
    assert scene.error is None
    said = [line for line in scene.said if "was lost (" in line]
    assert len(said) == 1 and "what it learned in this round is lost with it" in said[0]
    assert weights(tmp_path / "run", made, "worker-0").keys()


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_what_is_not_finite_ends_the_run_and_is_not_tried_again(
    poison: str, make: Callable[..., Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last committed window stands; party, window and microbatch are named."""
    _, made = make(1, 2)
    calls: list[int] = []
    if poison == "loss":
        forward = Party.take_forward

        def bad(self: Party, header: Any, tensors: Any) -> Any:
            if self.role == "owner" and (header.round, header.index) == (1, 1):
                calls.append(1)
                monkeypatch.setattr(self._goal.__class__, "value", lambda *_: (torch.tensor(torch.nan), 3))
            return forward(self, header, tensors)

        monkeypatch.setattr(Party, "take_forward", bad)
    else:
        backward = Party.take_backward

        def worse(self: Party, header: Any, gradient: torch.Tensor) -> Any:
            if self.role == "worker" and (header.round, header.index) == (1, 1):
                calls.append(1)
                gradient = gradient * torch.inf
            return backward(self, header, gradient)

        monkeypatch.setattr(Party, "take_backward", worse)
    scene = play(made, tmp_path / "run", monkeypatch)
    assert isinstance(scene.error, ModelError) and scene.error.exit_code == 4 and len(calls) == 1
    text = str(scene.error)
    assert ("owner 0" if poison == "loss" else "worker ") in text and "microbatch 1 of owner 0" in text
    assert "window 0 of round 1" in text
    assert weights(tmp_path / "run", made, "owner-0").keys()  # round 0 is there


def test_another_owner_of_a_server_goes_on_when_one_is_lost(
    make: Callable[..., Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is agreed there is no window to do again: the server serves the others."""
    _, made = make(2, 1, {"body-sync": "round"}, architecture="two-stage", **{"cut-layers": 2})
    strike = once(is_("from", ("owner", 1), training.Stepped), lambda scene: scene.kill(("owner", 1), links_first=True))
    scene = play(made, tmp_path / "run", monkeypatch, strike)
    assert scene.error is None
    assert [row["samples"] for kind, row in scene.rows if kind == "round"] == [20, 20]


def test_an_owner_that_alone_cannot_reach_the_server_is_the_one_to_go(
    make: Callable[..., Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shape in ({}, {"architecture": "two-stage", "cut-layers": 2}):
        _, made = make(2, 1, {"body-sync": "round"}, **shape)
        strike = once(is_("from", ("owner", 1), training.Stepped), lambda scene: scene.cut(1, 0))
        scene = play(made, tmp_path / f"run-{len(shape)}", monkeypatch, strike)
        assert scene.error is None
        assert [row["party"] for kind, row in scene.rows if kind == "lost"] == ["owner 1"]
        assert "cannot reach worker 0" in str(scene.ends["owner", 1])


def test_a_server_that_is_lost_ends_the_run(
    make: Callable[..., Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, made = make(2, 1, {"body-sync": "round"}, architecture="two-stage", **{"cut-layers": 2})
    for links_first in (False, True):
        strike = once(
            is_("from", ("owner", 1), training.Stepped),
            lambda scene, first=links_first: scene.kill(("worker", 0), links_first=first),
        )
        scene = play(made, tmp_path / f"run-{links_first}", monkeypatch, strike)
        assert isinstance(scene.error, PeerLostError) and "--resume" in str(scene.error)
        assert "no worker is left" in str(scene.error)
