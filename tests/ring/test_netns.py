"""Two machines, as two network namespaces with a cable between them, and what happens when the cable is cut."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from splitlm import Ring
from tests.faults.scene import PROMPT, command, paragraph

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]
SILENCE_S = 3


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@dataclass(frozen=True)
class Machines:
    """Two namespaces, their addresses, and the first one's end of the cable."""

    names: tuple[str, str]
    hosts: tuple[str, str]
    cable: str

    def run(self, machine: int, *words: str) -> subprocess.Popen[str]:
        return command(*words, within=("ip", "netns", "exec", self.names[machine]))

    def cut(self) -> None:
        ip("-n", self.names[0], "link", "set", self.cable, "down")


@pytest.fixture
def machines() -> Iterator[Machines]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("two namespaces: needs root and the ip command")
    tag = os.getpid()
    names, hosts, ends = (f"slA{tag}", f"slB{tag}"), ("10.91.7.1", "10.91.7.2"), (f"sla{tag}", f"slb{tag}")
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
            for name, host, end in zip(names, hosts, ends, strict=True):
                ip("-n", name, "addr", "add", f"{host}/24", "dev", end)
                ip("-n", name, "link", "set", end, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"two namespaces: this kernel makes none ({error.stderr.decode().strip()})")
        yield Machines(names, hosts, ends[0])
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def pair(machines: Machines, model: Path, new: int, *more: str) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """A head in one namespace, and a stage in the other that joins it."""
    address = f"{machines.hosts[0]}:7001"
    head = machines.run(
        0, "generate", str(model), "--prompt", PROMPT, "-n", str(new), "--stages", "2", "--listen", address,
        "--no-trace", "--threads", "1", *more,
    )  # fmt: skip
    return head, machines.run(1, "stage", "--join", address, "--no-trace", "--threads", "1", *more)


def test_a_stage_on_another_machine_and_a_cable_that_is_cut(machines: Machines, stories: Path) -> None:
    with Ring(str(stories), threads=1) as ring:
        expected = ring.generate(PROMPT, max_new_tokens=400).text
    head, stage = pair(machines, stories, 400)
    try:
        out, err = head.communicate(timeout=100)
        _, stage_err = stage.communicate(timeout=30)
        assert (head.returncode, stage.returncode) == (0, 0), (err, stage_err)
        assert out.rstrip("\n") == expected

        head, stage = pair(machines, stories, 400, "--ctrl-timeout", str(SILENCE_S / 2))
        assert head.stdout is not None
        got = head.stdout.read(1)
        machines.cut()
        begun = time.monotonic()
        out, err = head.communicate(timeout=60)
        _, stage_err = stage.communicate(timeout=60)
        assert time.monotonic() - begun < SILENCE_S + 20
        assert (head.returncode, stage.returncode) == (3, 3), (err, stage_err)
        assert f"silent for {SILENCE_S} s" in paragraph(err)
        assert "Node 1" in paragraph(err)
        assert f"silent for {SILENCE_S} s" in paragraph(stage_err)
        text = (got + out).rstrip("\n")
        assert expected.startswith(text)
        assert len(text) < len(expected)
    finally:
        for process in (head, stage):
            process.kill()
            process.wait()
