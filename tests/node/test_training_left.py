"""Who left a run while its links stand, as a stopped process does, is parted from: nothing of it is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from splitlm.bus.base import PeerGone
from splitlm.core import training
from tests.node.test_tuning import config, model_folder, rows_file
from tests.node.training_scene import Scene, Who, play

STAYS = {"owner": ("worker", 0), "worker": ("owner", 0)}


@pytest.mark.parametrize("gone", [("owner", 1), ("worker", 1)], ids=["owner", "worker"])
def test_no_link_to_one_that_left_is_kept(gone: Who, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator loses a party whose links do not end; the others close theirs by themselves."""
    folder = model_folder("bert", tmp_path / "model", 0.0)
    made = config(folder, rows_file(tmp_path, "classify"), server={"clients": [2, 2]}, learning={"body-sync": "window"})
    linked: list[bool] = []

    def strike(scene: Scene, way: str, who: Who, message: Any) -> None:
        watcher, peer = scene.planes.get(STAYS[gone[0]]), scene.peers.get(gone, "")
        if watcher is None:
            return
        if (
            isinstance(message, training.Window)
            and (message.round, message.window) == (0, 1)
            and gone not in scene.killed
        ):
            linked.append(gone in watcher.neighbours)
            scene.killed.add(gone)
            scene.silent.add(peer)
            scene._spokes[peer]._hub.tell(peer, PeerGone("".join(map(str, gone)), "it was silent", 10.0))
        elif isinstance(message, training.Gather) and len(linked) == 1:
            linked.append(gone in watcher.neighbours)
            scene._tasks[peer].cancel()

    scene = play(made, tmp_path / "run", monkeypatch, strike)
    assert scene.error is None
    assert [row["party"] for kind, row in scene.rows if kind == "lost"] == [f"{gone[0]} {gone[1]}"]
    assert linked == [True, False]
