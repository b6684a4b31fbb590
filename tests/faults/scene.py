"""What the fault tests share: rings whose stages can be hurt, and a look at what they leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from splitlm import Ring
from splitlm.core.errors import SplitlmError
from splitlm.model.source import resolve
from splitlm.node.join import run_stage
from splitlm.node.settings import Place, StageSettings
from tests.forks import is_mother

PROMPT = "Once upon a time"
HOST = "127.0.0.1"
SOON_S = 15.0
"""A few seconds, as this machine's noise stretches them."""


def children(pid: int | None = None) -> set[int]:
    """Direct children of a process, zombies too; not the one that its children are forked from (tests/forks.py)."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid or os.getpid()}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found |= set(map(int, task.read_text().split()))
    return {pid for pid in found if not is_mother(pid)}


def alive(pid: int) -> bool:
    """Whether a process is there; a zombie counts."""
    return Path(f"/proc/{pid}").exists()


def until(true: Callable[[], bool], seconds: float = SOON_S) -> bool:
    """Wait for it; whether it came."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _kernel() -> dict[str, set[object]]:
    fds = Path("/proc/self/fd")
    links: set[object] = set()
    for fd in fds.iterdir():
        with contextlib.suppress(OSError):
            links.add(str(fd.readlink()))
    return {
        "sockets": {link for link in links if str(link).startswith("socket:")},
        "logs": {link for link in links if str(link).endswith("(deleted)")},
        "threads": {t for t in threading.enumerate() if t.name.startswith(("splitlm", "asyncio"))},
        "children": set(children()),
    }


def _connections(sockets: set[object]) -> list[str]:
    """The kernel's lines about these: addresses and states, to find out whose they are."""
    inodes = {str(link)[len("socket:[") : -1] for link in sockets}
    lines = [
        line for kind in ("tcp", "tcp6", "udp", "unix") for line in Path(f"/proc/net/{kind}").read_text().splitlines()
    ]
    return [line for line in lines if inodes & set(line.split())]


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Sockets, threads, children and logs of this process are afterwards what they were before; no temporary file.

    What the kernel and a loop's last turn still take down is given a moment.
    """
    before, place = _kernel(), tempfile.tempdir

    def left() -> dict[str, set[object]]:
        return {name: now - before[name] for name, now in _kernel().items()}

    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = place
        until(lambda: not any(left().values()))
        found = left() | {"files": set(Path(folder).glob("splitlm*"))}
    assert not any(found.values()), (found, _connections(found["sockets"]))


class Wounded(Ring):
    """A ring that calls ``at`` with every line of progress, in its loop's thread."""

    def __init__(self, model: Path, at: Callable[[Wounded, str], None] | None = None, **settings: object) -> None:
        self.said: list[str] = []

        def say(line: str) -> None:
            self.said.append(line)
            if at is not None:
                at(self, line)

        settings = {"stages": 3, "threads": 1, "ctrl_timeout_s": 5.0, **settings}
        super().__init__(str(model), say=say, **settings)  # type: ignore[arg-type]


@dataclass
class ThreadStage:
    """A stage in a thread of this process: quick to start, and it can be anything but killed."""

    settings: StageSettings
    error: BaseException | None = None
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name="splitlm-test-stage", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(run_stage(self.settings))
        except SplitlmError as error:
            self.error = error

    def join(self) -> SplitlmError | None:
        """Wait for its end; its error."""
        self.thread.join(SOON_S)
        assert not self.thread.is_alive(), "the stage hangs"
        assert self.error is None or isinstance(self.error, SplitlmError)
        return self.error


def settings(port: int, **options: object) -> StageSettings:
    """A stage that joins the head at this port."""
    fields = {"head": (HOST, port), "resolve": resolve, "deadline_s": 20.0, "threads": 1, "token": "t", **options}
    return StageSettings(**fields)  # type: ignore[arg-type]


def free_ports(count: int) -> list[int]:
    """Ports that nobody held a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind((HOST, 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def fixed(
    model: Path,
    blocks: Sequence[tuple[int, int]],
    *,
    sends: dict[int, int] | None = None,
    wires: dict[int, int] | None = None,
    **options: object,
) -> tuple[Wounded, list[ThreadStage], list[int]]:
    """A ring of fixed places ``[0, a), [a, b), …`` on loopback, not yet open.

    Args:
        sends: ``{node: port}`` where a node sends elsewhere than to the next (a proxy, say).
        wires: ``{node: node}`` where a node sends to another than the next.
        options: of the ring.

    Returns:
        The ring, its stages (which run already), and the data port of each node.
    """
    control, *data = free_ports(len(blocks) + 1)
    to = [data[(wires or {}).get(node, (node + 1) % len(blocks))] for node in range(len(blocks))]
    for node, port in (sends or {}).items():
        to[node] = port
    ring = Wounded(
        model,
        listen=(HOST, control),
        data=(HOST, data[0]),
        send=(HOST, to[0]),
        static=blocks[0][1],
        **{"token": "t", "deadline_s": 20.0, **options},
    )
    stages = [
        ThreadStage(
            settings(
                control, model=str(model), place=Place(*blocks[node], listen=(HOST, data[node]), send=(HOST, to[node]))
            )
        )
        for node in range(1, len(blocks))
    ]
    return ring, stages, data


def command(*arguments: str, within: Sequence[str] = ()) -> subprocess.Popen[str]:
    """``splitlm`` as its own process; both outputs are pipes.

    Args:
        within: the beginning of a command that runs another.
    """
    return subprocess.Popen(
        [*within, sys.executable, "-m", "splitlm", *arguments],
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def paragraph(stderr: str) -> str:
    """The one error paragraph of a process; more or fewer are a failure."""
    found = [line for line in stderr.splitlines() if line.startswith("splitlm: ")]
    assert len(found) == 1, stderr
    assert "Traceback" not in stderr
    return found[0]
