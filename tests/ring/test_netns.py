"""Two machines, as two network namespaces with a cable between them, and what happens when the cable is cut."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitlm import Ring
from tests.faults.scene import PROMPT, paragraph
from tests.machines import Machines, two_machines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150), pytest.mark.usefixtures("forks")]
SILENCE_S = 3


@pytest.fixture
def machines() -> Iterator[Machines]:
    with two_machines() as made:
        yield made


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
        got = os.read(head.stdout.fileno(), 1).decode()  # of the text and no more: ``communicate`` gives the rest
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
