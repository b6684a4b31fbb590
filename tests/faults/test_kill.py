"""kill -9 and SIGSTOP, of each process at each point: one named error, and nothing left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from splitlm.core.errors import NetworkError, PeerLostError
from splitlm.node import join
from tests.faults.scene import (
    HOST,
    PROMPT,
    SOON_S,
    ThreadStage,
    Wounded,
    alive,
    children,
    command,
    free_ports,
    nothing_left,
    paragraph,
    settings,
    until,
)

pytestmark = pytest.mark.usefixtures("forks")


def killer(line: str, index: int) -> object:
    """Kills a stage when the head says this line."""

    def at(ring: Wounded, said: str) -> None:
        if said.startswith(line) and len(ring.stage_pids) > index:
            os.kill(ring.stage_pids[index], signal.SIGKILL)

    return at


@pytest.mark.parametrize(
    ("line", "index"),
    [
        ("waiting for 2 stages", 0),
        ("waiting for every stage to load", 1),
        ("waiting for every stage to link", 0),
    ],
)
def test_a_stage_killed_before_the_ring_is_ready(line: str, index: int, stories: Path) -> None:
    with nothing_left():
        ring = Wounded(stories, killer(line, index))
        with pytest.raises(NetworkError) as caught:
            ring.open()
            # It had linked before it died: then the first session learns of it.
            ring.generate(PROMPT, max_new_tokens=450)
        ring.close()
        pids = ring.stage_pids
        pid = pids[index]
        text = str(caught.value)
        assert "ended by SIGKILL" in text, text
        # By its number and name once it has them, by its process before.
        assert f"The stage process {pid}" in text or (f":{pid})" in text and text.startswith("Node ")), text
        assert len(pids) == 2
        assert not any(map(alive, pids))
        with pytest.raises(NetworkError, match="not open"):
            ring.generate(PROMPT)


@pytest.mark.parametrize("node", [1, 2])
def test_a_stage_killed_mid_generation_and_every_later_call(node: int, stories: Path) -> None:
    with nothing_left():
        pieces: list[str] = []
        with Wounded(stories) as ring:
            by_node = {m.node: m.join.name for m in ring._host._members.placed}  # type: ignore[union-attr]
            name = by_node[node]
            whole = ring.generate(PROMPT, max_new_tokens=400).text
            with pytest.raises(PeerLostError) as caught:
                for piece in ring.stream(PROMPT, max_new_tokens=400):
                    pieces.append(piece)
                    if len(pieces) == 5:
                        os.kill(int(name.rpartition(":")[2]), signal.SIGKILL)
                        begun = time.monotonic()
            assert time.monotonic() - begun < SOON_S
            assert whole.startswith("".join(pieces))  # what came was right, and not all came
            assert len("".join(pieces)) < len(whole)
            text = str(caught.value)
            assert text.startswith(f"Node {node} ({name}) is gone: its process was ended by SIGKILL"), text
            for _ in range(2):
                begun = time.monotonic()
                with pytest.raises(PeerLostError) as again:
                    ring.generate(PROMPT)
                assert str(again.value) == text
                assert time.monotonic() - begun < 1
            assert str(ring.error) == text
        assert not any(map(alive, ring.stage_pids))


def test_a_stage_killed_while_idle_is_known_before_anyone_asks(stories: Path) -> None:
    with nothing_left(), Wounded(stories, stages=2) as ring:
        ring.generate(PROMPT, max_new_tokens=2)
        assert ring.error is None
        os.kill(ring.stage_pids[0], signal.SIGKILL)
        assert until(lambda: ring.error is not None)
        with pytest.raises(PeerLostError, match=r"Node 1 .*SIGKILL"):
            ring.generate(PROMPT)


def test_a_stage_that_is_stopped_falls_silent_and_is_killed_at_the_end(
    stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitlm.node.ring.REPORT_S", 1.0)  # it will not report
    with nothing_left():
        with Wounded(stories, ctrl_timeout_s=1.0) as ring:
            stopped = ring.stage_pids[0]
            begun = 0.0
            with pytest.raises(PeerLostError, match=rf"Node \d \(.*:{stopped}\) is gone: .*silent for 2 s"):
                for i, _ in enumerate(ring.stream(PROMPT, max_new_tokens=500)):
                    if i == 5:
                        os.kill(stopped, signal.SIGSTOP)
                        begun = time.monotonic()
            assert 1 < time.monotonic() - begun < SOON_S
            begun = time.monotonic()
        assert time.monotonic() - begun < SOON_S
        assert not any(map(alive, ring.stage_pids))


def test_the_command_says_it_once_and_exits_3(stories: Path) -> None:
    process = command(
        "generate", str(stories), "--prompt", PROMPT, "--stages", "3", "-n", "500", "--no-trace", "--quiet"
    )
    try:
        assert process.stdout is not None
        process.stdout.read(1)
        pids = children(process.pid)
        assert len(pids) == 2
        os.kill(max(pids), signal.SIGKILL)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 3, err
        assert f":{max(pids)}) is gone: its process was ended by SIGKILL" in paragraph(err)
        assert not any(map(alive, pids))
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("point", ["before any joined", "loading", "generating"])
def test_the_heads_stages_go_when_it_is_killed(point: str, stories: Path, request: pytest.FixtureRequest) -> None:
    if point != "generating":
        request.getfixturevalue("interpreters")  # its stages are still importing
    process = command(
        "generate", str(stories), "--prompt", PROMPT, "--stages", "3", "-n", "500", "--no-trace", "--deadline", "120"
    )
    pids: set[int] = set()
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        if point == "generating":
            process.stdout.read(1)
        else:
            wanted = {"before any joined": "waiting for 2 stages", "loading": "to load its blocks"}[point]
            assert any(wanted in line for line in iter(process.stderr.readline, ""))
        assert until(lambda: len(children(process.pid)) == 2)
        pids = children(process.pid)
        process.kill()
        process.wait()
        # Importing torch takes what it takes; then each sees by itself that nobody waits for it.
        assert until(lambda: not any(map(alive, pids)), 30)
    finally:
        process.kill()
        process.communicate()
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


def test_stages_of_a_killed_head_do_not_wait_for_its_word(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its lines end at once, and which is seen first is chance."""
    monkeypatch.setattr(join, "GRACE_S", 600.0)
    (port,) = free_ports(1)
    words = ("--prompt", PROMPT, "--stages", "3", "-n", "500", "--no-trace", "--listen", f"{HOST}:{port}")
    process = command("generate", str(stories), *words)
    try:
        stages = [ThreadStage(settings(port, token="")) for _ in range(2)]
        assert process.stdout is not None
        process.stdout.read(1)
        process.kill()
        assert [type(stage.join()) for stage in stages] == [PeerLostError] * 2
    finally:
        process.kill()
        process.communicate()
