"""A ring over TLS gives the text of the uncut model, as processes here and as machines that join."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitlm import Ring
from splitlm.cli.certs import make
from tests.faults.scene import HOST, PROMPT, command, free_ports, paragraph
from tests.link.certificates import HOSTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150), pytest.mark.usefixtures("forks")]
NEW = 40


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make(folder, ["head", "one", "two"], HOSTS, 2)
    return folder


def test_a_ring_of_three_over_tls_gives_the_uncut_text(made: Path, stories: Path) -> None:
    with Ring(str(stories), threads=1) as ring:
        uncut = ring.generate(PROMPT, max_new_tokens=NEW)
    with Ring(str(stories), stages=3, threads=1, tls=made / "head") as ring:
        cut = ring.generate(PROMPT, max_new_tokens=NEW)
    assert cut.tokens == uncut.tokens and cut.text == uncut.text


def test_machines_join_with_folders_of_their_own_and_a_plain_one_does_not(made: Path, stories: Path) -> None:
    (port,) = free_ports(1)
    head = command(
        *("generate", str(stories), "--listen", f"{HOST}:{port}", "--stages", "3", "--threads", "1", "--no-trace"),
        *("--prompt", PROMPT, "-n", str(NEW), "--tls", str(made / "head")),
    )
    processes = [head]
    try:
        plain = command("stage", str(stories), "--join", f"{HOST}:{port}", "--no-trace")
        processes.append(plain)
        _, said = plain.communicate(timeout=100)
        assert plain.returncode == 3
        assert "does not speak TLS, and this side does" in paragraph(said)
        for name in ("one", "two"):
            words = ("--join", f"{HOST}:{port}", "--no-trace", "--tls", str(made / name))
            processes.append(command("stage", str(stories), *words))
        results = [process.communicate(timeout=100) for process in processes if process is not plain]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes if process is not plain] == [0, 0, 0], results
    with Ring(str(stories), threads=1) as ring:
        assert results[0][0].rstrip("\n") == ring.generate(PROMPT, max_new_tokens=NEW).text
