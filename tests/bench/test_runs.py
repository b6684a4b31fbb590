"""The benches run to their end on a tiny model, tell every figure, and leave no process behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from splitlm.bench import auto, laps
from splitlm.bench.arm import Arm
from splitlm.bench.comparison import Comparison, Comparisons, Plan, measure
from splitlm.bench.figure import Figure
from splitlm.bench.migrate import COMPARISONS as MOVES
from splitlm.bench.migrate import HELD
from splitlm.bench.publish import load
from splitlm.bench.ring import COMPARISONS
from splitlm.core.errors import SplitlmError, UsageError
from splitlm.model import toy
from splitlm.telemetry.record import Migration
from tests.faults.scene import children

pytestmark = pytest.mark.usefixtures("forks")
SHORT = 10
"""Tokens of a window of simulated devices, whose every token takes what they are told."""


def splitlm(*words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "splitlm", "--quiet", *words], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.mark.slow
def test_bench_wire(tmp_path: Path) -> None:
    """Every figure, sane: a link is dearer than a bare socket, and not by a thousand times."""
    out = splitlm("bench", "wire", "--repetitions", "1", "--messages", "30", "--trace-dir", str(tmp_path))
    figures = {f.name: f for f in load(tmp_path / "result.json").figures}
    assert set(figures) >= {"link-hop", "link-decode", "link-chunk", "link-1mib", "throughput", "handshake", "crc"}
    assert all(name in out for name in figures)
    assert 1 < figures["link-decode"].value < 1000
    assert 0.01 < figures["throughput"].value < 2
    assert 5 < figures["crc"].value < 150


@pytest.mark.slow
def test_bench_ring(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Two comparisons: hops and laps come from the trace, the ceiling from the bare ring."""
    result = tmp_path / "out" / "r.json"
    words = ("--tokens", "6", "--repetitions", "1", "--only", "stream", "--only", "uncut", "--json", str(result))
    out = splitlm("bench", "ring", str(tiny("llama")), *words, "--trace-dir", str(tmp_path / "run"))
    figures = {f.name: f for f in load(result).figures}
    assert {"stream", "stream-ceiling", "hop", "hop-echo", "laps", "laps-p50", "laps-p99", "uncut"} <= set(figures)
    assert figures["laps-p50"].count == figures["laps-p99"].count == 3
    assert 0 <= figures["laps-p50"].low <= figures["laps-p99"].low
    assert "private" not in figures and "private" not in out
    assert 0 < figures["stream"].value < 20
    assert figures["hop"].count == 2 * 5 * 3
    assert 0 < figures["hop"].value < 1000 and figures["hop-echo"].value > 1
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["only"] == ["stream", "uncut"]


@pytest.mark.slow
def test_bench_ring_with_several_sessions(tiny: Callable[[str], Path]) -> None:
    """Simulated devices overlap, on any machine: four sessions are faster than one."""
    figures = measure(COMPARISONS, str(tiny("llama")), ["devices"], tokens=8, repetitions=1)
    assert [f.name for f in figures] == ["devices"]
    assert 1.2 < figures[0].value < 5


@pytest.mark.slow
def test_bench_migrate(tmp_path: Path) -> None:
    """Moves in both directions on a toy: every figure, the KV of 113 tokens to the byte, one ring unannounced."""
    model = toy.build(tmp_path / "toy")
    words = ("--repetitions", "1", "--only", "shift", "--only", "windows", "--trace-dir", str(tmp_path / "run"))
    splitlm("bench", "migrate", str(model), *words)
    figures = {f.name: f for f in load(tmp_path / "run" / "result.json").figures}
    assert {"barrier", "barrier-echo", "windows-laps", "shift-pull", "shift-push", "staging", "release"} <= set(figures)
    assert 0 < figures["barrier"].value <= figures["barrier-head"].value
    assert 0 < figures["windows-laps"].value <= 1.5
    assert figures["weights-read"].value > 0
    row = 2 * 2 * (64 // 4) * 4  # keys and values of two heads
    sent = laps.read(tmp_path / "run" / "shift")
    moved = [r for r in sent if isinstance(r, Migration) and r.role == "receiver"]
    assert [r.kv_bytes for r in moved] == [HELD * row] * 4
    assert figures["kv-barrier"].value * 1024 >= row and figures["kv-background"].value * 1024 >= 93 * row
    stopped = [r for r in laps.read(tmp_path / "run" / "stop-and-copy") if isinstance(r, Migration)]
    assert len(stopped) == 8 and not any(r.background_bytes for r in stopped)


@pytest.mark.slow
def test_bench_auto(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks leave the slow stage and it pays; where none is slow, a few windows move nothing."""
    monkeypatch.setattr(auto, "QUIET", 1)
    monkeypatch.setattr(auto, "WINDOW", SHORT)
    monkeypatch.setattr(auto, "TOKENS", (auto.IN_TIME + 1) * SHORT + 2)
    monkeypatch.setattr(auto, "LONGEST", 2 * SHORT)
    figures = {f.name: f for f in measure({"auto": auto.AUTO}, str(tiny("llama")), ["auto"], tokens=8, repetitions=1)}
    assert list(figures) == ["auto", "auto-window", "auto-quiet", "auto-decide"]
    assert figures["auto"].value > 1.1
    assert figures["auto-window"].value >= 3 and figures["auto-quiet"].value == 0
    assert figures["auto-decide"].value > 0


def test_unknown_comparisons_are_named() -> None:
    """And so are those that exist."""
    assert "stream" in splitlm("bench", "ring", "--only", "nonsense", code=2)


@pytest.mark.parametrize(
    ("comparisons", "name", "tokens", "said"),
    [
        (
            COMPARISONS,
            "stream",
            121,
            "of texts of 129 tokens. Expected at most 128, the context of the model. Use at most --tokens 120.",
        ),
        (
            COMPARISONS,
            "devices",
            505,
            "of texts of 513 tokens. Expected at most 512, the context of the toy. Use at most --tokens 504.",
        ),
        (MOVES, "shift", 2, "of texts of 136 tokens. Expected at most 128, the context of the model. Leave it out"),
        (
            COMPARISONS,
            "windows",
            300,
            "of texts of 308 tokens. Expected at most 128, the context of the model. Use at most --tokens 120.",
        ),
    ],
)
def test_a_text_beyond_the_context_is_refused_before_anything_is_measured(
    comparisons: Comparisons, name: str, tokens: int, said: str, tiny: Callable[[str], Path]
) -> None:
    """The context would end it early, and the shorter text would be taken for a faster one."""
    started: list[int] = []

    def first(plan: Plan) -> list[Figure]:
        """It fits."""
        started.append(plan.tokens)
        return []

    both, model = {"first": Comparison(first, lambda _: 128), **comparisons}, str(tiny("gpt2"))
    with pytest.raises(UsageError) as caught:
        measure(both, model, ["first", name], tokens=tokens, repetitions=1)
    assert f"The comparison {name} is {said}" in str(caught.value)
    assert not started
    measure(both, model, ["first"], tokens=tokens, repetitions=1)
    assert started == [tokens]


def test_an_arm_that_fails_says_why() -> None:
    """The child's last words reach the caller, and it is reaped."""
    with Arm("nonsense") as arm, pytest.raises(UsageError, match="no kind of bench process"):
        arm.ready()
    with pytest.raises(ProcessLookupError):
        os.kill(arm.pid, 0)
    with Arm("uncut", model="/nonexistent") as arm, pytest.raises(SplitlmError, match="uncut"):
        arm.ready()


def test_an_arm_ends_with_its_input() -> None:
    """An echo takes turns, then its server ends with it."""
    with Arm("echo").ready() as arm:
        took = arm.run(size=100, count=5)
        assert 0 < took["ms"] <= took["p90"] < 1000
        (server,) = children(arm.pid)
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)


def test_an_arm_imports_nothing_of_the_directory_it_runs_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own splitlm folder, or a socket.py, is not ours."""
    (tmp_path / "splitlm").mkdir()
    (tmp_path / "splitlm" / "__init__.py").write_text("raise SystemExit(9)")
    (tmp_path / "socket.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    with Arm("echo").ready() as arm:
        assert arm.run(size=100, count=5)["ms"] > 0
