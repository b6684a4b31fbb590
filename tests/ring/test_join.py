"""Fixed places as processes of their own, from the command line, in any order: the text is the uncut model's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from splitlm import Ring
from tests.faults.scene import HOST, PROMPT, command, free_ports, paragraph

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150), pytest.mark.usefixtures("forks")]
NEW = "40"


def place(
    model: Path, begin: int, end: int, recv: int | str, send: int | str, ctrl: int, *more: str
) -> subprocess.Popen[str]:
    flags = {"--layer-begin": begin, "--layer-end": end, "--recv": recv, "--send": send, "--ctrl": ctrl}
    words = [
        str(w)
        for k, v in flags.items()
        for w in (k, v if isinstance(v, str) or k.startswith("--layer") else f"{HOST}:{v}")
    ]
    return command("stage", str(model), *words, "--no-trace", "--threads", "1", *more)


def finish(processes: dict[str, subprocess.Popen[str]]) -> dict[str, tuple[str, str]]:
    try:
        return {name: process.communicate(timeout=100) for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


@pytest.mark.parametrize("order", ["head first", "head last"])
def test_three_fixed_places_give_the_uncut_text(order: str, stories: Path) -> None:
    ctrl, a, b, c = free_ports(4)

    def head() -> None:
        processes["head"] = place(stories, -1, 2, a, b, ctrl, "--prompt", PROMPT, "--max-new-tokens", NEW)

    processes: dict[str, subprocess.Popen[str]] = {}
    if order == "head first":
        head()
    processes["last"] = place(stories, 4, -1, c, a, ctrl)
    processes["middle"] = place(stories, 2, 4, b, c, ctrl)
    if order == "head last":
        head()
    said = finish(processes)
    assert {name: process.returncode for name, process in processes.items()} == dict.fromkeys(processes, 0), said
    with Ring(str(stories), threads=1) as ring:
        assert said["head"][0].rstrip("\n") == ring.generate(PROMPT, max_new_tokens=int(NEW)).text


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8")
def test_a_stage_is_reached_where_its_user_said_not_where_it_joined_from(stories: Path) -> None:
    """It joins from 127.0.0.1 and listens at 127.0.0.2, for tokens and for blocks that move."""
    ctrl, a, b, c = free_ports(4)
    processes = {
        "head": place(stories, -1, 2, a, b, ctrl, "--prompt", PROMPT, "--max-new-tokens", "5", "--deadline", "30"),
        "middle": place(stories, 2, 4, b, f"127.0.0.2:{c}", ctrl, "--deadline", "30"),
        "last": place(stories, 4, -1, f"127.0.0.2:{c}", a, ctrl, "--deadline", "30"),
    }
    said = finish(processes)
    assert {name: process.returncode for name, process in processes.items()} == dict.fromkeys(processes, 0), said


def test_places_that_leave_a_block_out_end_both_sides_with_what_is_missing(stories: Path) -> None:
    """Another stage may still come and fill the gap, so the head waits its deadline; the last one is there first."""
    ctrl, a, b = free_ports(3)
    last = place(stories, 3, -1, b, a, ctrl, "--deadline", "60")
    processes = {"last": last}
    try:
        assert last.stderr is not None
        heard = [last.stderr.readline()]
        while "joining the head" not in heard[-1]:
            assert heard[-1], heard
            heard.append(last.stderr.readline())
        processes["head"] = place(stories, -1, 2, a, b, ctrl, "--prompt", PROMPT, "--deadline", "5")
    finally:
        said = finish(processes)
    assert {name: process.returncode for name, process in processes.items()} == {"head": 2, "last": 2}, said
    for _, err in said.values():
        assert "nobody holds block 2" in paragraph(err)
