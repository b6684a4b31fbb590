"""Two machines, as two network namespaces with a cable between them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.faults.scene import command


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@dataclass(frozen=True)
class Machines:
    """Two namespaces, their addresses, and the first one's end of the cable."""

    names: tuple[str, str]
    hosts: tuple[str, str]
    cable: str

    def on(self, machine: int) -> tuple[str, ...]:
        """The beginning of a command that runs another there."""
        return ("ip", "netns", "exec", self.names[machine])

    def run(self, machine: int, *words: str) -> subprocess.Popen[str]:
        return command(*words, within=self.on(machine))

    def cut(self) -> None:
        ip("-n", self.names[0], "link", "set", self.cable, "down")


@contextmanager
def two_machines() -> Iterator[Machines]:
    """Skips where there can be none."""
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
