"""All roles on one machine, at a broker: the same run as at the star, and an end in words where the broker is none."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.bus.server import Broker, free_port
from tests.faults.scene import command, paragraph, until
from tests.node.test_tuning import ROWS, model_folder, rows_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200), pytest.mark.usefixtures("forks")]
LONG_S = 90.0
SEEDS = int(os.environ.get("SPLITLM_TEST_SEEDS", "1"))
"""How many random strikes there are."""


def settings(folder: Path, **sections: Any) -> Path:
    """A file of settings of one round, in a folder where a model and rows may be already."""
    model, rows = folder / "model", folder / "train.jsonl"
    if not model.exists():
        model_folder("bert", model, 0.1), rows_file(folder, "classify")
    server = {"tail-blocks": 1, "model-path": str(model), "data-path": str(rows), "validation": False}
    server |= sections.pop("server", {})
    learning = {"batch-size": 4, "learning-rate": 1e-3} | sections.pop("learning", {})
    path = folder / "run.yaml"
    path.write_text(json.dumps({"server": server, "learning": learning, "log_path": str(folder), **sections}))
    return path


def start(config: Path, out: Path) -> subprocess.Popen[str]:
    return command("train", str(config), "--local", "--folder", str(out))


def at_broker(port: int, *, tensors: bool = True) -> dict[str, Any]:
    transport = {"u-shape": {"transport": "rabbitmq" if tensors else "tcp"}}
    return {"rabbit": {"port": port}, "learning": transport, "server": {"bus": "rabbitmq"}}


def test_all_through_the_broker_gives_the_model_that_links_give(rabbit: Broker, tmp_path: Path) -> None:
    made = []
    for name, sections in (("star", {}), ("broker", at_broker(rabbit.port))):
        process = start(settings(tmp_path, name=f"local-{name}", **sections), tmp_path / name)
        _, err = process.communicate(timeout=LONG_S)
        assert process.returncode == 0, err
        made.append((tmp_path / name / "model" / "model.safetensors").read_bytes())
    assert made[0] == made[1]
    rows = [json.loads(line) for line in (tmp_path / "broker" / "metrics.jsonl").read_text().splitlines()]
    assert [row["samples"] for row in rows if row["record"] == "round"] == [ROWS]
    assert not {name for name in rabbit.queues() if name.startswith("splitlm.")}


@pytest.mark.parametrize("control", [True, False])
def test_no_broker_is_one_paragraph(control: bool, tmp_path: Path) -> None:
    sections = at_broker(free_port())
    if not control:
        sections["server"] = {"bus": "star"}
    process = start(settings(tmp_path, **sections), tmp_path / "out")
    _, err = process.communicate(timeout=LONG_S)
    assert process.returncode == 3, err
    assert "The broker cannot be reached" in paragraph(err)
    assert "rabbit.port" in paragraph(err)


def test_tensors_do_not_survive_their_broker_and_the_run_says_so(rabbit: Broker, tmp_path: Path) -> None:
    sections = at_broker(rabbit.port)
    sections["learning"] = {
        "batch-size": 1,
        "u-shape": sections["learning"]["u-shape"] | {"microbatches-per-window": 1},
    }
    process = start(settings(tmp_path, name="lost", **sections), tmp_path / "out")
    metrics = tmp_path / "out" / "metrics.jsonl"
    try:
        assert until(lambda: metrics.exists() and metrics.read_text().count('"window"') > 4, LONG_S)
        rabbit.stop(kill=True)
        rabbit.start()
        _, err = process.communicate(timeout=LONG_S)
        assert process.returncode == 3, err
        assert "lost" in paragraph(err)
    finally:
        rabbit.start()
        process.kill()
        process.communicate()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_broker_killed_at_random_costs_nothing_where_tensors_go_over_links(
    seed: int, rabbit: Broker, tmp_path: Path
) -> None:
    """It comes back, and the weights are those of a run whose broker was left in peace."""
    chance, made, took = random.Random(seed), [], 0.0
    for name in ("left", "killed"):
        sections = at_broker(rabbit.port, tensors=False)
        sections["learning"]["u-shape"] |= {"microbatches-per-window": 1}
        sections["learning"] |= {"batch-size": 1}
        sections["server"] |= {"global-round": 2}
        process = start(settings(tmp_path, name=f"{name}-{seed}", **sections), tmp_path / name)
        metrics = tmp_path / name / "metrics.jsonl"
        try:
            assert until(lambda metrics=metrics: metrics.exists() and '"window"' in metrics.read_text(), LONG_S)
            begin = time.monotonic()
            if name == "killed":
                time.sleep(chance.uniform(0.0, took))
                rabbit.stop(kill=True)
                time.sleep(chance.uniform(0.0, 2.0))
                rabbit.start()
            _, err = process.communicate(timeout=LONG_S)
            took = time.monotonic() - begin
            assert process.returncode == 0, err
        finally:
            rabbit.start()
            process.kill()
            process.communicate()
        made.append((tmp_path / name / "model" / "model.safetensors").read_bytes())
    assert made[0] == made[1]
