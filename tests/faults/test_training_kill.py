"""kill -9 and SIGSTOP of parties and of the coordinator, as processes, at random times: what is promised comes true.

``SPLITLM_TEST_SEEDS`` sets how many random strikes there are (2 by default).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from splitlm.finetune.manifest import MANIFEST
from tests.faults.scene import alive, children, command, paragraph, until
from tests.forks import command_line
from tests.node.test_tuning import model_folder, rows_file

SEEDS = int(os.environ.get("SPLITLM_TEST_SEEDS", "2"))
TOOK_S = [0.0]
"""What an undisturbed run took."""
pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("forks")]


@dataclass
class Local:
    """A ``splitlm train --local`` that runs, and its parties by the number in their command lines."""

    process: subprocess.Popen[str]
    run: Path
    pids: list[int]

    def rounds(self) -> int:
        """Complete rounds so far."""
        return max((int(path.parent.name) + 1 for path in self.run.glob(f"rounds/*/{MANIFEST}")), default=0)

    def of(self, layer: int) -> list[int]:
        """Processes of owners (1) or workers (2), in the order in which they were started."""
        found = []
        for pid in sorted(self.pids):
            words = command_line(pid)
            if "--layer-id" in words and words[words.index("--layer-id") + 1] == str(layer):
                found.append(pid)
        return found

    def ends(self, seconds: float = 90) -> str:
        """Wait for its end; its stderr. Nothing of it is left then."""
        _, err = self.process.communicate(timeout=seconds)
        assert until(lambda: not any(map(alive, self.pids)), 30), "a party is left"
        if self.process.returncode >= 0:
            assert not [path for path in self.run.rglob("*") if ".part" in path.name]
        return err


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Settings of a short run over a tiny Llama."""
    folder = tmp_path_factory.mktemp("kill")
    model_folder("llama", folder / "model", 0.1)
    rows_file(folder, "text")
    settings: dict[str, Any] = {
        "name": "kill",
        "server": {
            "global-round": 4,
            "clients": [1, 2],
            "tail-blocks": 1,
            "model-path": "model",
            "data-path": "train.jsonl",
            "validation": False,
        },
        "learning": {
            "learning-rate": 1e-3,
            "batch-size": 2,
            "body-sync": "window",
            "u-shape": {"microbatches-per-window": 2, "timeout-seconds": 30, "adaptive-weights": False},
        },
        "log_path": "logs",
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder


def start(place: Path, run: Path, *more: str) -> Local:
    where = ("--resume", str(run)) if (run / "config.yaml").exists() else ("--folder", str(run))
    local = Local(command("train", str(place / "config.yaml"), "--local", *where, *more), run, [])
    assert until(lambda: len(children(local.process.pid)) == 3 or local.process.poll() is not None, 60)
    local.pids = sorted(children(local.process.pid))
    return local


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    """Whatever fails, no process of a test outlives it."""
    yield
    for pid in children():
        for inner in children(pid):
            os.kill(inner, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(place: Path) -> dict[str, torch.Tensor]:
    """The weights of a run that nothing happened to."""
    begun = time.monotonic()
    local = start(place, place / "whole")
    err = local.ends()
    assert local.process.returncode == 0, err
    TOOK_S[0] = time.monotonic() - begun
    return weights(place / "whole")


def same(run: Path, whole: dict[str, torch.Tensor]) -> None:
    """As near as sums of float32 in another order are; in one process in float64 it is 1e-9 (tests/node)."""
    found = weights(run)
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-4)


def test_a_worker_that_is_killed_costs_a_window(place: Path, whole: dict[str, torch.Tensor], tmp_path: Path) -> None:
    local = start(place, tmp_path / "run")
    assert until(lambda: local.rounds() >= 1, 60)
    victim = local.of(2)[1]
    os.kill(victim, signal.SIGKILL)
    err = local.ends()
    assert local.process.returncode == 0, err
    assert '"record":"lost"' in (tmp_path / "run" / "metrics.jsonl").read_text()
    same(tmp_path / "run", whole)


def test_a_worker_that_is_stopped_is_found_by_its_silence(
    place: Path, whole: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    local = start(place, tmp_path / "run")
    assert until(lambda: local.rounds() >= 1, 60)
    victim = local.of(2)[0]
    begun = time.monotonic()
    os.kill(victim, signal.SIGSTOP)
    err = local.ends()
    assert local.process.returncode == 0, err
    assert time.monotonic() - begun > 5  # it was waited for
    same(tmp_path / "run", whole)


def test_an_owner_that_is_killed_ends_a_run_that_has_no_other(
    place: Path, whole: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    local = start(place, run)
    assert until(lambda: local.rounds() >= 2, 60)
    os.kill(local.of(1)[0], signal.SIGKILL)
    said = paragraph(local.ends())
    assert local.process.returncode == 3
    assert "owner 0" in said and "no owner is left" in said and "--resume" in said
    again = start(place, run)
    err = again.ends()
    assert again.process.returncode == 0, err
    same(run, whole)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whoever_is_killed_at_random_the_weights_are_those_of_an_undisturbed_run(
    seed: int, place: Path, whole: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Again and again until the run comes to its end; each strike is survived or ends in one paragraph."""
    chance, run, code = random.Random(seed), tmp_path / "run", 1
    for attempt in range(4):
        local = start(place, run)
        if attempt < 3:  # the last one is left in peace
            time.sleep(chance.uniform(0.0, TOOK_S[0]))
            who = chance.choice(["worker", "owner", "coordinator"])
            pids = {"worker": local.of(2), "owner": local.of(1), "coordinator": [local.process.pid]}[who]
            if pids and local.process.poll() is None:
                os.kill(chance.choice(pids), signal.SIGKILL)
        err, code = local.ends(), local.process.returncode
        assert code in (0, 3, -signal.SIGKILL), err
        if code == 0:
            break
        if code == 3:
            said = paragraph(err)
            assert "lost" in said or "ended by SIGKILL" in said
    assert code == 0
    same(run, whole)
