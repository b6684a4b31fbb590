"""A run that is gone on with ends as if nothing had happened, and takes up only what its own model and cut wrote."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from splitlm.core import messages, training
from splitlm.core.config import RunConfig
from splitlm.core.config_cautions import SECOND_DRAW
from splitlm.core.errors import CheckpointError, ModelError, PeerLostError, PeerMissingError, UsageError
from splitlm.finetune import crossing, partyfile, store
from splitlm.finetune.manifest import MANIFEST
from splitlm.finetune.noise import gaussian
from splitlm.finetune.recipe import read_rows
from tests.node.test_training_faults import is_
from tests.node.test_tuning import config, model_folder, rows_file
from tests.node.training_scene import Scene, Who, once, play, weights

Make = Callable[..., RunConfig]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Settings of a run of three rounds over a tiny BERT with dropout."""
    folder = model_folder("bert", tmp_path / "model", 0.2)
    data = rows_file(tmp_path, "classify")

    def made(owners: int = 1, workers: int = 1, more: dict[str, Any] | None = None, **server: Any) -> RunConfig:
        server = {"clients": [owners, workers], "global-round": 3, **server}
        more = dict(more or {})
        learning = {"u-shape": {"microbatches-per-window": 5, "timeout-seconds": 30}, **more.pop("learning", {})}
        return config(folder, data, server=server, learning=learning, **more)

    return made


def same(one: Path, other: Path, made: RunConfig, *parties: str) -> None:
    """The last rounds of two runs hold the same weights."""
    differ: list[str] = []
    for party in parties:
        left, right = weights(one, made, party), weights(other, made, party)
        assert left.keys() == right.keys()
        largest = {name: float((tensor - right[name]).abs().max()) for name, tensor in left.items()}
        differ += [f"{party} {name}: {by:g}" for name, by in largest.items() if not by <= 1e-9]
    assert not differ


LORA = {"fine-tune": {"name": "LoRA", "LoRA": {"r": 4, "alpha": 8}}}
TWO: dict[str, Any] = {"architecture": "two-stage", "cut-layers": 2}


@pytest.mark.parametrize(
    ("owners", "workers", "more", "server", "moment"),
    [
        (1, 1, {}, {}, is_("to", ("worker", 0), messages.Commit, seq=5)),
        (1, 1, LORA, {}, is_("from", ("worker", 0), training.Saved, round=1)),
        (2, 2, {"learning": {"body-sync": "round", "u-shape": {"adaptive-weights": False}}}, {}, None),
        (2, 1, {}, TWO, is_("from", ("owner", 1), training.Notify, round=1)),
        (1, 2, {"optimizer": {"reset-each-round": True}, "learning": {"body-sync": "window"}}, {}, None),
    ],
)
def test_a_run_whose_coordinator_was_killed_is_gone_on_with(
    owners: int,
    workers: int,
    more: dict[str, Any],
    server: dict[str, Any],
    moment: Callable[[str, Who, Any], bool] | None,
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = make(owners, workers, more, **server)
    assert play(made, tmp_path / "whole", monkeypatch).error is None
    moment = moment or is_("to", ("owner", 0), training.Gather, round=1)
    run = tmp_path / "run"
    stopped = play(made, run, monkeypatch, once(moment, Scene.stop_lead))
    assert all(isinstance(error, PeerLostError) for error in stopped.ends.values())  # they say so, and end
    assert sorted(path.parent.name for path in run.glob(f"rounds/*/{MANIFEST}")) == ["000000"]
    rounds: list[int] = []
    loaded: list[int] = []

    def note(scene: Scene, way: str, who: Who, message: Any) -> None:
        if way == "to" and who == ("owner", 0) and isinstance(message, training.Round):
            rounds.append(message.round)
        if isinstance(message, training.Start):
            loaded.append(message.resume)

    again = play(made, run, monkeypatch, note, resume=True)
    assert again.error is None and rounds == [1, 2] and set(loaded) == {0}
    parties = [f"owner-{n}" for n in range(owners)] + [f"worker-{n}" for n in range(workers)]
    same(tmp_path / "whole", run, made, *parties)


@pytest.mark.parametrize("shared", [False, True])
def test_owners_that_come_back_in_another_order_have_their_own_state(
    shared: bool, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with rows of its own; on machines of their own, or with one folder for both."""
    lines = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    rows = [tmp_path / "rows-a.jsonl", tmp_path / "rows-b.jsonl"]
    for path, part in zip(rows, (lines[:15], lines[15:]), strict=True):
        path.write_text("".join(part))
    made = make(2, 1)

    def owners(run: Path, *order: int) -> dict[str, Any]:
        folders = {} if shared else {("owner", at): run / f"of-{number}" for at, number in enumerate(order)}
        return {"folders": folders, "data": {("owner", at): rows[number] for at, number in enumerate(order)}}

    def last(run: Path, number: int) -> tuple[str, dict[str, torch.Tensor]]:
        """What the owner of these rows is called, and its optimizer's state after the last round."""
        mark = read_rows(made, "train", rows[number]).fingerprint
        folder = (run if shared else run / f"of-{number}") / "rounds" / "000002"
        names = [path.stem.removeprefix("party-") for path in folder.glob("party-owner-*.json")]
        stored = {name: partyfile.load_party(folder, name) for name in names}
        found = [name for name in names if stored[name].extra == {"rows": mark}]
        assert len(found) == 1
        return found[0], stored[found[0]].optimizer["state"][0]  # type: ignore[index]

    run, other = tmp_path / "run", tmp_path / "other"
    stop = once(is_("to", ("owner", 0), training.Gather, round=1), Scene.stop_lead)
    play(made, run, monkeypatch, stop, **owners(run, 0, 1))
    shutil.copytree(run, other)
    assert play(made, run, monkeypatch, resume=True, **owners(run, 0, 1)).error is None
    assert play(made, other, monkeypatch, resume=True, **owners(other, 1, 0)).error is None
    for number in (0, 1):
        (name, state), (there, same_state) = last(run, number), last(other, number)
        assert name == there and state.keys() == same_state.keys()
        for key, tensor in state.items():
            torch.testing.assert_close(tensor, same_state[key], rtol=0, atol=1e-9)
    assert float(last(run, 0)[1]["step"]) != float(last(run, 1)[1]["step"])  # which tells them apart


def test_an_owner_without_its_files_is_turned_away_by_name(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, run = make(2, 1), tmp_path / "run"
    folders: dict[Who, Path] = {("owner", n): run / f"of-{n}" for n in (0, 1)}
    stop = once(is_("to", ("owner", 0), training.Gather, round=1), Scene.stop_lead)
    play(made, run, monkeypatch, stop, folders=folders)
    monkeypatch.setattr("tests.node.training_scene.DEADLINE_S", 2.0)
    scene = play(made, run, monkeypatch, resume=True, folders={**folders, ("owner", 1): tmp_path / "new"})
    assert isinstance(scene.error, PeerMissingError) and "1 owner to register" in str(scene.error)
    away = [line for line in scene.said if "turned away" in line]
    assert len(away) == 1 and "need the files of owner-" in away[0] and "nobody" in away[0]
    told = [str(error) for error in scene.errors if "need the files" in str(error)]
    assert len(told) == 1 and "no place" in told[0] and "--folder" in told[0]


def test_noise_of_a_round_that_is_done_again_is_another_and_its_owner_says_so(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Round 1 is sent twice: the text is the same, and no stream of noise is."""
    made, run = make(1, 1, {"privacy": {"noise": 0.5}}), tmp_path / "run"
    drawn: dict[tuple[object, ...], list[torch.Tensor]] = {}

    def note(secret: bytes, what: Any, shape: Any) -> torch.Tensor:
        drawn.setdefault(tuple(what), []).append(gaussian(secret, what, shape))
        return drawn[tuple(what)][-1]

    monkeypatch.setattr(crossing, "gaussian", note)
    play(made, run, monkeypatch, once(is_("to", ("owner", 0), training.Gather, round=1), Scene.stop_lead))
    assert SECOND_DRAW not in caplog.messages and {len(of) for of in drawn.values()} == {1}
    assert play(made, run, monkeypatch, resume=True).error is None
    assert SECOND_DRAW in caplog.messages
    assert {what[0]: len(of) for what, of in drawn.items()} == {0: 1, 1: 2, 2: 1}
    for what, of in drawn.items():
        assert what[0] != 1 or (of[0].shape == of[1].shape and not torch.isclose(of[0], of[1]).all())


def test_rows_that_changed_are_told_of(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, run = make(), tmp_path / "run"
    play(made, run, monkeypatch, once(is_("to", ("owner", 0), training.Gather, round=1), Scene.stop_lead))
    data = tmp_path / "train.jsonl"
    data.write_text(data.read_text().replace("w1 ", "w2 "))
    assert play(made, run, monkeypatch, resume=True).error is None
    assert [line for line in caplog.messages if "rows of owner-0 are others" in line and "round 0" in line]


def test_a_run_that_was_killed_in_its_first_round_begins_anew(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, run = make(), tmp_path / "run"
    play(made, run, monkeypatch, once(is_("to", ("owner", 0), messages.Commit, seq=2), Scene.stop_lead))
    assert play(made, run, monkeypatch, resume=True).error is None
    assert "No round" in caplog.text
    assert play(made, tmp_path / "whole", monkeypatch).error is None
    same(tmp_path / "whole", run, made, "owner-0", "worker-0")
    done = play(made, run, monkeypatch, resume=True)  # nothing is left to do, and nothing is done
    assert done.error is None and not [kind for kind, _ in done.rows if kind == "window"]
    same(tmp_path / "whole", run, made, "owner-0", "worker-0")


def test_more_rounds_than_at_first(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert play(make(**{"global-round": 2}), tmp_path / "run", monkeypatch).error is None
    assert play(make(), tmp_path / "run", monkeypatch, resume=True).error is None
    assert play(make(), tmp_path / "whole", monkeypatch).error is None
    same(tmp_path / "whole", tmp_path / "run", make(), "owner-0", "worker-0")


def test_a_lost_worker_is_back_when_the_run_is_gone_on_with(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no file of the round, and takes those of the other replica, which is the same."""
    made, run = make(1, 2, {"learning": {"body-sync": "window"}}), tmp_path / "run"
    assert play(made, tmp_path / "whole", monkeypatch).error is None

    def strike(scene: Scene, way: str, who: Who, message: Any) -> None:
        if isinstance(message, training.Window) and message.round == 0 and message.window == 1 and not scene.killed:
            scene.kill(("worker", 0))
        if isinstance(message, training.Window) and message.round == 1:
            scene.stop_lead()

    play(made, run, monkeypatch, strike)
    stored: list[str] = []

    def note(scene: Scene, way: str, who: Who, message: Any) -> None:
        if isinstance(message, training.Start):
            stored.append(message.stored)

    again = play(made, run, monkeypatch, note, resume=True)
    assert again.error is None and sorted(stored) == ["owner-0", "worker-1", "worker-1"]
    same(tmp_path / "whole", run, made, "owner-0", "worker-0", "worker-1")


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"tail-blocks": 0}, "cut as"),
        ({"clients": [2, 1]}, r"2 owner\(s\)"),
        ({"clients": [1, 2]}, r"2 worker\(s\)"),
        ({"rank": 4}, "LoRA of rank 4"),
        ({"architecture": "two-stage"}, "cut as"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_name(
    other: dict[str, Any], says: str, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    play(make(), run, monkeypatch, once(is_("to", ("owner", 0), training.Round, round=1), Scene.stop_lead))
    more = {"fine-tune": {"name": "LoRA", "LoRA": {"r": other.pop("rank")}}} if "rank" in other else {}
    scene = play(make(1, 1, more, **other), run, monkeypatch, resume=True)
    assert isinstance(scene.error, CheckpointError)
    with pytest.raises(CheckpointError, match=says):
        raise scene.error
    assert "all weights" in str(scene.error) and "1 owner(s)" in str(scene.error)
    assert play(make(), run, monkeypatch, resume=True).error is None  # it is as it was


def test_where_no_run_lies_nothing_is_gone_on_with(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = play(make(), tmp_path / "run", monkeypatch, resume=True)
    assert isinstance(scene.error, UsageError) and "no run here" in str(scene.error)


def test_a_damaged_round_is_passed_over(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, run = make(), tmp_path / "run"
    play(made, run, monkeypatch, once(is_("to", ("owner", 0), training.Round, round=2), Scene.stop_lead))
    (run / "rounds" / "000001" / "party-worker-0.json").write_text("{}")
    seen: list[int] = []
    scene = play(
        made,
        run,
        monkeypatch,
        lambda scene, way, who, m: seen.append(m.round) if isinstance(m, training.Round) else None,
        resume=True,
    )
    assert scene.error is None and set(seen) == {1, 2}
    assert play(made, tmp_path / "whole", monkeypatch).error is None
    same(tmp_path / "whole", run, made, "owner-0", "worker-0")


@pytest.mark.parametrize("whose", ["a party's", "the manifest", "the model"])
def test_a_disk_that_fills_leaves_the_last_round(
    whose: str, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, run = make(), tmp_path / "run"
    full = OSError(errno.ENOSPC, "No space left on device")
    at = [False]

    def strike(scene: Scene, way: str, who: Who, message: Any) -> None:
        at[0] = at[0] or (isinstance(message, training.Gather) and message.round == 1)

    with monkeypatch.context() as patch:
        save, write = partyfile.save_tensors, store.write
        if whose == "a party's":

            def fails(path: Path, tensors: Any) -> None:
                if at[0] and "worker" in path.name:
                    path.write_bytes(b"half")
                    raise full
                save(path, tensors)

            patch.setattr(partyfile, "save_tensors", fails)
        elif whose == "the manifest":

            def fails_too(path: Path, data: bytes) -> None:
                if at[0]:
                    raise full
                write(path, data)

            patch.setattr(store, "write", fails_too)
        else:
            from splitlm.model import checkpoint

            def model(*_: Any, **__: Any) -> None:
                raise checkpoint.unwritable(run / "model", full)

            patch.setattr("splitlm.node.keeper.write_outputs", lambda *a: model() if at[0] else None)
        scene = play(made, run, monkeypatch, strike)
    assert type(scene.error) is ModelError and scene.error.exit_code == 4
    text = str(scene.error)
    assert "No space left on device" in text and str(run) in text and "\n" not in text
    assert text.startswith("worker 0 (") == (whose == "a party's")
    assert [path for path in run.rglob("*") if ".part" in path.name] == []
    assert sorted(path.parent.name for path in run.glob(f"rounds/*/{MANIFEST}")) == ["000000"]
    assert play(made, run, monkeypatch, resume=True).error is None
    assert play(made, tmp_path / "whole", monkeypatch).error is None
    same(tmp_path / "whole", run, made, "owner-0", "worker-0")


def test_parties_that_keep_no_files_are_named_and_their_rounds_are_not_whole(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitlm.node.shelf.Shelf.save", lambda self, _: [])
    scene = play(make(), tmp_path / "run", monkeypatch)
    assert scene.error is None
    said = [line for line in scene.said if "cannot be resumed" in line]
    assert len(said) == 1 and "owner 0, worker 0" in said[0]
    assert list(tmp_path.glob(f"run/rounds/*/{MANIFEST}")) == []


def test_what_is_not_a_partys_own_file_is_not_put_into_a_manifest(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie = [training.SavedFile("../config.yaml", 1, "0" * 64)]
    monkeypatch.setattr("splitlm.node.shelf.Shelf.save", lambda self, _: lie)
    scene = play(make(), tmp_path / "run", monkeypatch)
    assert scene.error is not None and "reports the files" in str(scene.error)
    assert list(tmp_path.glob(f"run/rounds/*/{MANIFEST}")) == []


def test_the_settings_that_changed_are_named(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, run = make(), tmp_path / "run"
    play(made, run, monkeypatch, once(is_("to", ("owner", 0), training.Round, round=1), Scene.stop_lead))
    other = msgspec.structs.replace(made, learning=msgspec.structs.replace(made.learning, learning_rate=0.5))
    assert play(other, run, monkeypatch, resume=True).error is None
    named = [line for line in caplog.messages if "was" in line and "learning-rate" in line]
    assert named == ["learning.learning-rate is 0.5, and was 0.01 when the run began"]
    assert not [line for line in caplog.messages if "when the run began" in line and line not in named]
