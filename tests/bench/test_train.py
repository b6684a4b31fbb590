"""The bench of training runs to its end on tiny models and tells every figure."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from splitlm.bench import comparison, train, trainlanes, trainlinks, trainrun, worker
from splitlm.bench.arm import Arm
from splitlm.bench.publish import load
from splitlm.bench.train import COMPARISONS, measure
from splitlm.bench.trainrun import Turn
from splitlm.bench.trainset import Size
from splitlm.bench.trend import trend

pytestmark = pytest.mark.usefixtures("forks")
TINY = Size(hidden=16, blocks=3, batch=2, length=4, microbatches=4, windows=2)
SIZES = ("--hidden", "32", "--blocks", "3", "--batch", "4", "--length", "128", "--microbatches", "2", "--windows", "1")


class Here:
    """An arm in a thread of this process: the same work without the seconds that an interpreter takes to start."""

    def __init__(self, kind: str, **settings: Any) -> None:
        for name in ("core", "spin"):
            settings.pop(name, None)
        self._work, self._pool = worker.make(kind, settings), ThreadPoolExecutor(1)
        self._turn: Future[dict[str, Any]] | None = None
        self.told = self._work.told

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ready(self) -> Here:
        return self

    def ask(self, verb: str = "run", **settings: Any) -> None:
        self._turn = self._pool.submit(getattr(self._work, verb), **settings)

    def answer(self) -> dict[str, Any]:
        assert self._turn is not None
        return self._turn.result(60)

    def run(self, verb: str = "run", **settings: Any) -> dict[str, Any]:
        self.ask(verb, **settings)
        return self.answer()

    def close(self) -> None:
        self._work.close()
        self._pool.shutdown()


@pytest.fixture
def _here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Arms are threads; those that need a process group of torch stay processes."""

    def arm(kind: str, **settings: Any) -> Any:
        return Arm(kind, **settings) if kind == "train-pipe" else Here(kind, **settings)

    for module in (comparison, trainrun, trainlanes):
        monkeypatch.setattr(module, "Arm", arm)
    for module in (train, trainlinks):
        monkeypatch.setattr(module, "TOY", replace(TINY, microbatches=8))
    monkeypatch.setattr(train, "LEAST_PACE_MS", 4.0)
    yield


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("uncut", ["uncut", "uncut-shares", "uncut-threads", "uncut-average"]),
        ("unequal", ["unequal", "unequal-rounds"]),
        ("link", ["link-64mib", "link-64mib-echo", "link-32kib", "link-32kib-echo"]),
        ("rounds", ["rounds-owner", "rounds-worker", "rounds-coordinator", "rounds-graphs"]),
        pytest.param("stages", ["stages"], marks=pytest.mark.slow),
    ],
)
def test_a_comparison_tells_all_its_figures(name: str, told: list[str]) -> None:
    """Each with a value, its spread, and a goal where it is one to be reached."""
    found = {f.name: f for f in measure([name], size=TINY, repetitions=1, rounds=6)}
    assert list(found) == told
    assert all(f.low <= f.value <= f.high and f.text for f in found.values())
    if name != "rounds":
        assert all(f.value > 0 for f in found.values() if f.name != "uncut-shares")
        assert found[told[0]].goal is not None
    else:
        assert [f.count for f in found.values()] == [5, 5, 5, 2]
        assert 0 < found["rounds-graphs"].low <= found["rounds-graphs"].high <= 1


@pytest.mark.slow
def test_bench_train_on_the_command_line(tmp_path: Path) -> None:
    """Real processes: what travels is the tensors, and hardly more."""
    words = ("bench", "train", "--only", "bytes", "--repetitions", "1", *SIZES, "--trace-dir", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "splitlm", "--quiet", *words], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    result = load(tmp_path / "result.json")
    (figure,) = result.figures
    assert (figure.name, figure.count) == ("bytes", 4) and "bytes" in done.stdout
    assert 1 < figure.low <= figure.high < 1.02
    assert result.settings["hidden"] == 32 and "rounds" in result.settings


def test_the_first_window_is_no_part_of_the_steady_rate() -> None:
    """Its rows and its seconds are left out; the round's own rate has both."""
    turn = Turn(begun=1.0, ended=10.0, saved=12.0)
    turn.stamps = [(0, 4.0, 8), (0, 5.0, 0), (1, 7.0, 8), (1, 6.5, 0), (2, 9.0, 4), (2, 9.5, 0)]
    assert turn.told() == {"rows": 20, "seconds": 9.0, "average": 2.0, "steady": [12, 4.5]}


def test_a_trend_is_the_slope_and_its_error() -> None:
    """A line has no error, noise around a level has a slope within two of them, and two points have none to tell."""
    assert trend([3.0, 5.0, 7.0, 9.0]) == (2.0, 0.0)
    slope, error = trend([1.0, -1.0, -1.0, 1.0, 1.0, -1.0, -1.0, 1.0])
    assert abs(slope) < 2 * error
    assert trend([1.0, 4.0]) == (3.0, 0.0) and trend([1.0]) == (0.0, 0.0)


def test_every_comparison_has_a_script() -> None:
    """benchmarks/ and the bench name the same."""
    scripts = Path(__file__).parents[2].glob("benchmarks/train_*.py")
    assert {path.stem.removeprefix("train_") for path in scripts} == set(COMPARISONS)
