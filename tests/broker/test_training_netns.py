"""Training on two machines over TLS: at a real broker and at the star; who has no place there hears why, at once."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from splitlm.cli import certs
from tests.bus.server import SERVER, Broker
from tests.faults.scene import paragraph, until
from tests.link.certificates import folders
from tests.machines import Machines, two_machines
from tests.node.test_tuning import model_folder, rows_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280), pytest.mark.usefixtures("forks")]
PASSWORD = "a-password-of-ours"
LONG_S = 150.0
"""For seven processes that import torch, on a busy machine."""


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with two_machines() as made:
        yield made


@pytest.fixture(scope="module")
def certificates(machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``a`` and ``b`` for the two machines."""
    folder = tmp_path_factory.mktemp("certificates")
    certs.make(folder, ["a", "b"], ["localhost", "127.0.0.1", *machines.hosts], 2)
    return folder


@pytest.fixture(scope="module")
def distant(machines: Machines, certificates: Path) -> Iterator[Broker]:
    """A broker on the first machine, which both reach at its address there."""
    if not SERVER.exists():
        pytest.skip("rabbitmq-server is not installed")
    broker = Broker(certificates / "a", machines.hosts[0], machines.on(0))
    try:
        broker.start()
        yield broker
    finally:
        broker.remove()


def settings(folder: Path, *, clients: Sequence[int] = (1, 1), **sections: Any) -> Path:
    """A file of settings of one short round."""
    model, rows = model_folder("bert", folder / "model", 0.0), rows_file(folder, "classify")
    server = {
        "clients": list(clients), "global-round": 1, "tail-blocks": 1, "model-path": str(model),
        "data-path": str(rows), "validation": False,
    }  # fmt: skip
    learning = {"batch-size": 2, "learning-rate": 1e-3} | sections.pop("learning", {})
    path = folder / "run.yaml"
    path.write_text(json.dumps({"server": server, "learning": learning, "log_path": str(folder), **sections}))
    return path


class Run:
    """A coordinator on the first machine, and parties wherever they are started."""

    def __init__(self, machines: Machines, config: Path, certificates: Path, *coordinator: str) -> None:
        self.machines, self.config, self.certificates = machines, config, certificates
        self.folder = config.parent / "out"
        self.processes: list[subprocess.Popen[str]] = []
        self.coordinator = self._start(0, "coordinator", "--folder", str(self.folder), *coordinator)

    def party(self, machine: int, layer: int, *more: str) -> subprocess.Popen[str]:
        return self._start(machine, "client", "--layer-id", str(layer), "--threads", "1", *more)

    def _start(self, machine: int, verb: str, *more: str) -> subprocess.Popen[str]:
        certificate = f"security.certs={self.certificates / 'ab'[machine]}"
        process = self.machines.run(machine, verb, str(self.config), "--set", certificate, "--deadline", "100", *more)
        self.processes.append(process)
        return process

    def windows(self) -> int:
        """Rows of windows that the coordinator wrote so far."""
        path = self.folder / "metrics.jsonl"
        return path.read_text().count('"window"') if path.exists() else 0

    def end(self) -> list[str]:
        """What all said, once they are through."""
        deadline, said = time.monotonic() + LONG_S, []
        for process in self.processes:
            said.append(process.communicate(timeout=max(1.0, deadline - time.monotonic()))[1])
        return said

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


def broker_section(broker: Broker, machines: Machines, *, tls: bool) -> dict[str, Any]:
    port = broker.tls_port if tls else broker.port
    return {"address": machines.hosts[0], "port": port, "tls": tls}


def trained(run: Run, said: list[str]) -> None:
    assert [process.returncode for process in run.processes] == [0] * len(run.processes), "\n".join(said)
    assert (run.folder / "model" / "model.safetensors").exists()


def test_four_owners_and_two_workers_meet_at_a_broker(
    machines: Machines, distant: Broker, certificates: Path, tmp_path: Path
) -> None:
    config = settings(tmp_path, clients=(4, 2), name="netns", rabbit=broker_section(distant, machines, tls=True))
    with Run(machines, config, certificates) as run:
        for machine in (0, 0, 1, 1):
            run.party(machine, 1)
        for machine in (0, 1):
            run.party(machine, 2)
        trained(run, run.end())
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["samples"] for row in rows if row["record"] == "round") == 40
    assert not {name for name in distant.queues() if name.startswith("splitlm.netns.")}


def test_a_broker_that_restarts_within_a_round_costs_nothing(
    machines: Machines, distant: Broker, certificates: Path, tmp_path: Path
) -> None:
    config = settings(
        tmp_path,
        name="restart",
        rabbit=broker_section(distant, machines, tls=False),
        learning={"batch-size": 1, "u-shape": {"microbatches-per-window": 1}},
    )
    with Run(machines, config, certificates) as run:
        run.party(1, 1)
        run.party(0, 2)
        assert until(lambda: run.windows() > 4, LONG_S)
        distant.stop()
        held = run.windows()
        distant.start()
        said = run.end()
        trained(run, said)
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    (closed,) = [row for row in rows if row["record"] == "round"]
    assert (closed["samples"], closed["windows"], closed["repeated"]) == (40, 40, 0)
    assert held < run.windows()


def test_at_the_star_over_tls_and_whoever_has_another_certificate_is_refused(
    machines: Machines, certificates: Path, tmp_path: Path
) -> None:
    config = settings(tmp_path)
    at = f"{machines.hosts[0]}:7001"
    with Run(machines, config, certificates, "--listen", at) as run:
        strangers = [
            run.party(1, 2, "--join", at, "--set", f"security.certs={folders() / 'other' / 'a'}"),
            run.party(1, 2, "--join", at, "--set", "security.tls=off"),
            run.party(1, 2, "--join", at, "--set", "security.certs=null"),
        ]
        ends = [process.communicate(timeout=LONG_S)[1] for process in strangers]
        assert [process.returncode for process in strangers] == [3, 3, 2], ends
        assert "not signed by" in paragraph(ends[0])
        assert "TLS" in paragraph(ends[1])
        assert "splitlm certs" in paragraph(ends[2])
        run.processes = [process for process in run.processes if process not in strangers]

        run.party(1, 1, "--join", at)
        run.party(1, 2, "--join", at, "--tensor-port", "7100")
        trained(run, run.end())


def test_a_coordinator_without_a_certificate_or_without_its_broker_says_so(
    machines: Machines, distant: Broker, certificates: Path, tmp_path: Path
) -> None:
    config = settings(tmp_path)
    lone = machines.run(0, "coordinator", str(config), "--listen", f"{machines.hosts[0]}:7001")
    rabbit = broker_section(distant, machines, tls=False) | {"username": "nobody", "password": PASSWORD}
    config.with_name("wrong.yaml").write_text(json.dumps(json.loads(config.read_text()) | {"rabbit": rabbit}))
    config.with_name("none.yaml").write_text(
        json.dumps(json.loads(config.read_text()) | {"rabbit": rabbit | {"port": 1}})
    )
    wrong = machines.run(0, "coordinator", str(config.with_name("wrong.yaml")))
    none = machines.run(1, "client", str(config.with_name("none.yaml")), "--layer-id", "2")
    ends = [process.communicate(timeout=LONG_S)[1] for process in (lone, wrong, none)]
    assert [process.returncode for process in (lone, wrong, none)] == [2, 3, 3], ends
    assert "splitlm certs" in paragraph(ends[0])
    assert "refused the user 'nobody'" in paragraph(ends[1])
    assert "cannot be reached" in paragraph(ends[2])
    assert not any(PASSWORD in text for text in ends)
