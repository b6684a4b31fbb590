"""Windows and moves between real processes over TCP: what they cost no token, and what a death leaves."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from splitlm import Ring
from splitlm.core import messages as m
from splitlm.core.errors import CutError, NetworkError, UsageError
from splitlm.core.shifts import Shift
from splitlm.node.identity import process_of
from splitlm.node.members import Members
from splitlm.telemetry.record import Migration, Window
from splitlm.telemetry.sinks import read_trace
from tests.faults.scene import PROMPT, SOON_S, alive, children, nothing_left, until

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("forks")]
CUTS = (2, 3)
STORY = {"max_new_tokens": 200, "ignore_eos": True, "logits": True}


def ring(model: Path, **settings: Any) -> Ring:
    return Ring(str(model), **{"cuts": CUTS, "threads": 1, **settings})


@pytest.fixture(scope="module")
def unmoved(stories: Path) -> Any:
    with ring(stories, window=0) as still:
        assert still.boundaries == []
        return still.generate(PROMPT, **STORY)


def equal(ours: Any, theirs: Any) -> bool:
    same = all(torch.equal(a, b) for a, b in zip(ours.logits, theirs.logits, strict=True))
    return ours.tokens == theirs.tokens and same


def test_200_tokens_have_9_barriers_and_moves_in_both_directions_change_no_bit(
    stories: Path, unmoved: Any, tmp_path: Path
) -> None:
    shifts = [Shift(30, 1, -1), Shift(70, 2, 1), Shift(90, 1, 1), Shift(130, 2, -1)]
    with nothing_left(), ring(stories, shifts=shifts, trace_dir=tmp_path) as moving:
        made = moving.generate(PROMPT, **STORY)
        boundaries = moving.boundaries
        assert moving.cut.boundaries == CUTS and moving.cut.epoch == 4
    assert equal(made, unmoved)
    assert [b.laps for b in boundaries] == [20 * i for i in range(1, 10)]
    assert [b.laps for b in boundaries if b.moves] == [40, 80, 100, 140]
    assert not any(b.outcome.aborted or b.late for b in boundaries)
    received = {side.epoch: side for side in moving.migrations if side.role == "receiver"}
    row = 2 * 4 * 8 * 4
    prompt = made.prompt_tokens
    for b in boundaries:
        if b.moves:
            due = row * (prompt + b.laps - 1)
            assert b.kv_bytes == received[b.outcome.epoch].kv_bytes == due
            assert received[b.outcome.epoch].kv_tokens == prompt + b.laps - 1
    donors = [side for side in moving.migrations if side.role == "donor"]
    assert len(donors) == 4 and all(0 < side.background_bytes < side.kv_bytes for side in donors)
    records = [record for path in tmp_path.glob("trace-node*.jsonl") for record in read_trace(path)]
    assert sum(isinstance(record, Migration) for record in records) == 8
    assert sum(isinstance(record, Window) for record in records) == 3 * 9
    assert all(side.pause_ms is not None and side.pause_ms > 0 for side in moving.migrations)


def test_a_stage_whose_checkpoint_is_gone_refuses_and_the_old_cut_serves_on(
    stories: Path, unmoved: Any, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(stories, copy)
    with nothing_left(), ring(copy, shifts=[Shift(40, 1, -1)]) as moving:
        (copy / "model.safetensors").unlink()
        made = moving.generate(PROMPT, **STORY)
        reasons = [b.outcome.reason for b in moving.boundaries if b.outcome.aborted]
        assert reasons and all(reason.startswith("Node 1 refused: ") and "copy" in reason for reason in reasons)
        assert moving.cut.epoch == 0 and moving.cut.boundaries == CUTS
        assert equal(made, unmoved)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"shifts": [Shift(20, 1, 1)]}, CutError, "--shift-k: Boundary 1 at block 2 cannot move by 1"),
        ({"shifts": [Shift(20, 3, 1)]}, CutError, "--shift-boundary: Boundary 3 cannot move"),
        ({"shifts": [Shift(20, 1, -1), Shift(40, 1, -1)]}, CutError, "Boundary 1 at block 1 cannot move by -1"),
        ({"shifts": [Shift(20)], "cuts": None, "stages": 1}, CutError, "at least two stages"),
        ({"shifts": [Shift(20)], "window": 0}, UsageError, "--window 0"),
        ({"shifts": [Shift(0)]}, UsageError, "--shift-at: It is 0"),
        ({"window": -1}, UsageError, "--window: It is -1"),
    ],
)
def test_moves_that_cannot_be_are_told_before_a_stage_is_started(
    settings: dict[str, Any], error: type[UsageError], words: str, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    with nothing_left(), pytest.raises(error, match=re.escape(words)), ring(stories, **settings):
        pass


def strike(
    monkeypatch: pytest.MonkeyPatch, kind: type[m.Message], victim: int, sign: signal.Signals
) -> Callable[[], float]:
    """Hurt the stage at a place just before the head says this to it; returns when that was."""
    send, struck = Members.send, []

    async def hurting(members: Members, node: int, message: m.Message) -> None:
        moves = not isinstance(message, m.Prepare) or message.cut is not None
        if (
            isinstance(message, kind)
            and node == victim
            and moves
            and (kind is not m.Commit or message.epoch)
            and not struck
        ):
            name = {member.node: member.join.name for member in members.placed}[victim]
            os.kill(process_of(name), sign)
            struck.append(time.monotonic())
        await send(members, node, message)

    monkeypatch.setattr(Members, "send", hurting)
    return lambda: struck[0]


def lost(moving: Ring, unmoved: Any, when: Callable[[], float], within: float) -> str:
    """Write until the ring breaks; why it did. What came is right, and comes no more."""
    pieces: list[str] = []
    with pytest.raises(NetworkError) as caught:
        pieces.extend(moving.stream(PROMPT, max_new_tokens=200, ignore_eos=True))
    assert time.monotonic() - when() < within
    got = "".join(pieces)
    assert unmoved.text.startswith(got) and len(got) < len(unmoved.text)
    with pytest.raises(NetworkError):
        moving.generate(PROMPT)
    return str(caught.value)


# In a move of boundary 2 by 1, node 2 gives to node 1; in one of boundary 1 by −1, node 2 looks on.
ROLES = {"donor": (2, Shift(40, 2, 1)), "receiver": (1, Shift(40, 2, 1)), "bystander": (2, Shift(40, 1, -1))}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("kind", [m.Announce, m.Prepare, m.Commit, m.Finish], ids=lambda kind: kind.__name__)
def test_a_stage_killed_in_any_state_of_a_move_is_named(
    role: str, kind: type[m.Message], stories: Path, unmoved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, asked = ROLES[role]
    cuts = (1, 2) if role != "bystander" else CUTS
    with nothing_left():
        when = strike(monkeypatch, kind, victim, signal.SIGKILL)
        with ring(stories, shifts=[asked], cuts=cuts, ctrl_timeout_s=3.0) as moving:
            text = lost(moving, unmoved, when, SOON_S)
        assert re.search(rf"Node {victim} \(stage .*\) is gone: its process was ended by SIGKILL", text), text
        state = {
            m.Announce: "'idle'|gathering",
            m.Prepare: "'gathering' of barrier 2",
            m.Commit: "'committing' of barrier 2",
        }
        assert re.search(f"the head was in state .*({state.get(kind, 'idle')})|state unknown", text), text
        assert not any(map(alive, moving.stage_pids))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (m.Announce, r"Node 1 .*silent for 2 s"),
        (m.Prepare, r"Node 1 .*silent for 2 s"),
        (m.Commit, r"Node 1 did not say DONE in time in state 'committing' of barrier 2; state unknown"),
    ],
    ids=["Announce", "Prepare", "Commit"],
)
def test_a_receiver_that_stands_still_is_named(
    kind: type[m.Message], words: str, stories: Path, unmoved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitlm.node.ring.REPORT_S", 1.0)  # the one that stands still will not report
    with nothing_left():
        when = strike(monkeypatch, kind, 1, signal.SIGSTOP)
        with ring(stories, shifts=[Shift(40, 2, 1)], cuts=(1, 2), ctrl_timeout_s=1.0) as moving:
            text = lost(moving, unmoved, when, SOON_S)
            if kind is not m.Commit:
                assert moving.cut.epoch == 0
        assert re.search(words, text), text
        assert not any(map(alive, moving.stage_pids))


HEAD = """
import os, signal, sys
from splitlm import Ring
from splitlm.core import messages as m
from splitlm.core.shifts import Shift
from splitlm.node.members import Members
kind, send = getattr(m, sys.argv[2]), Members.send
async def dying(members, node, message):
    if node == 2 and isinstance(message, kind) and getattr(message, "epoch", 1):
        os.kill(os.getpid(), signal.SIGKILL)
    await send(members, node, message)
Members.send = dying
with Ring(sys.argv[1], cuts=(2, 3), threads=1, shifts=[Shift(40, 1, -1)], trace_dir=sys.argv[3]) as ring:
    print("open", flush=True)
    ring.generate("Once upon a time", max_new_tokens=200, ignore_eos=True)
"""


@pytest.mark.parametrize(("kind", "state"), [("Announce", "idle"), ("Prepare", ""), ("Commit", "")])
def test_stages_whose_head_is_killed_in_a_move_say_in_which_state_and_go(
    kind: str, state: str, stories: Path, tmp_path: Path
) -> None:
    head = subprocess.Popen([sys.executable, "-c", HEAD, str(stories), kind, str(tmp_path)], stdout=subprocess.PIPE)
    pids: set[int] = set()
    try:
        assert head.stdout is not None
        assert head.stdout.readline() == b"open\n"
        pids = children(head.pid)
        assert len(pids) == 2
        assert head.wait(60) == -signal.SIGKILL
        assert until(lambda: not any(map(alive, pids)), SOON_S)
        logs = [path.read_text() for path in tmp_path.glob("stage-*.log")]
        assert len(logs) == 2
        for log in logs:
            assert re.search(rf"splitlm: .*this stage was in state '{state or '.*'}'", log), log
    finally:
        head.kill()
        head.wait()
        for pid in filter(alive, pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
