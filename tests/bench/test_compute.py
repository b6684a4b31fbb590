"""The figures of an engine: every one on a tiny model, what is left out and why, and the bound of memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from splitlm.bench import compute, llamacpp
from splitlm.bench.comparison import measure
from splitlm.bench.engines import BatchWork, LoadWork
from splitlm.bench.figure import Goal, Result, figure, left_out, markdown, read_json, table, write_json
from splitlm.bench.generators import TransformersWork, UncutWork
from splitlm.bench.residency import BUFFERS, stage_shares
from splitlm.core.errors import UsageError
from splitlm.model.compute.choice import Choice, choose
from splitlm.model.load import ModelFiles
from splitlm.model.source import gguf_of
from splitlm.telemetry.record import Final, StageMeta
from tests.cli.command import run

fast = pytest.mark.skipif(choose("fast").name != "fast", reason="this machine has no float16 products")
MIB = 2**20


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@fast
@pytest.mark.slow
def test_every_figure_of_fast(tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp, "missing", lambda _: "it is not there")
    model = str(tiny("llama"))
    figures = measure(compute.COMPARISONS, model, list(compute.COMPARISONS), tokens=6, repetitions=2, compute="fast")
    by_name = {f.name: f for f in figures}
    assert set(by_name) == {
        *("uncut-bf16", "uncut-fp32", "rate", "llama", "stream", "stream-ceiling", "hop", "memory"),
        *("batch-4", "batch-8", "pack", "start", "start-load"),
    }
    assert by_name.pop("llama").note == "it is not there"
    assert all(f.count >= 2 and 0 < f.low <= f.value <= f.high for f in by_name.values())
    assert by_name["memory"].count == 3 and by_name["memory"].high <= 1
    assert 0.5 < by_name["start"].value < 2 and by_name["pack"].value < 1000
    goals = {name: str(f.goal) for name, f in by_name.items() if f.goal is not None}
    assert goals == {
        "uncut-bf16": "≥ 3 (3.6)",
        "stream": "≥ 0.85 (0.95)",
        "memory": "≤ 1",
        "batch-4": "≥ 2",
        "batch-8": "≥ 2",
        "start": "≤ 1.5",
    }


@fast
def test_sessions_that_step_together_make_what_each_makes_alone(tiny: Callable[[str], Path]) -> None:
    """Or else a batch would be measured that computes something else."""
    work = BatchWork(model=str(tiny("llama")), dtype="float32", compute="fast")
    made: list[list[int]] = []
    step = work._step

    def kept(steps: Any) -> list[int]:
        made.append(step(steps))
        return made[-1]

    work._step = kept  # type: ignore[method-assign]
    assert work.run(tokens=5, sessions=4)["tokens"] == 20
    together = made[:]
    assert [len(row) for row in together] == [4] * 5 and len(set(zip(*together, strict=True))) > 1
    for session in range(4):
        made.clear()
        work._stage.open(99)
        at, last = 0, torch.tensor([[3 + session + i for i in range(8)]])
        for row in together:
            out = work._stage.forward(99, last, at, logits=True)
            assert out is not None and int(out.argmax()) == row[session]
            at, last = at + last.shape[1], torch.tensor([[row[session]]])
        work._stage.close(99)
    assert not work._stage.sessions


@pytest.mark.parametrize("engine", ["exact", "int4"])
def test_an_engine_that_shares_no_product_takes_one_after_the_other(engine: str, tiny: Callable[[str], Path]) -> None:
    if engine != "exact" and choose(engine).why:
        pytest.skip("it does not work here")
    work = BatchWork(model=str(tiny("llama")), dtype="float32", compute=engine)
    assert work.told["width"] == 1
    widths: list[int] = []
    many = work._stage.forward_many

    def seen(steps: Any) -> Any:
        widths.append(len(steps))
        return many(steps)

    work._stage.forward_many = seen  # type: ignore[method-assign]
    work.run(tokens=3, sessions=4)
    assert widths == [1] * 12


def test_a_batch_of_transformers_counts_every_token(tiny: Callable[[str], Path]) -> None:
    work = TransformersWork(model=str(tiny("llama")), dtype="bfloat16")
    assert work.run(tokens=5)["tokens"] == 5 and work.run(tokens=5, sessions=4)["tokens"] == 20


@fast
def test_arms_run_the_engine_that_is_asked_for(tiny: Callable[[str], Path]) -> None:
    assert UncutWork(model=str(tiny("llama")), compute="fast").told["engine"] == "fast"
    assert UncutWork(model=str(tiny("llama"))).told["engine"] == "exact"
    work = LoadWork(model=str(tiny("llama")), dtype="float32", compute="fast")
    assert work.told["ms"] > 0 and work.run()["ms"] > 0
    assert LoadWork(model=str(tiny("llama")), dtype="float32", compute="exact").run()["ms"] < 1


def test_a_figure_that_is_left_out_says_why_everywhere() -> None:
    figures = [left_out("llama", "llama.cpp", "it is not there", unit="tokens/s"), figure("x", "y", [2.0])]
    assert figures[0].reached is None
    assert "left out" in table(figures) and "it is not there" in table(figures)
    assert "| llama.cpp | left out: it is not there | — |  |" in markdown(figures) and "| y | 2 × (2–2) |" in markdown(
        figures
    )
    result = Result(bench="ring", settings={}, versions={}, machine="", figures=figures)
    assert read_json(write_json(result)) == result


class Llama:
    """llama-cpp-python as far as it is used."""

    LLAMA_FTYPE_MOSTLY_F16, LLAMA_FTYPE_MOSTLY_Q8_0 = 1, 7

    def __init__(self) -> None:
        self.written: list[tuple[bytes, bytes, Any]] = []
        self.given: dict[str, Any] = {}
        self.resets, self.closed = 0, False

    def llama_model_quantize_default_params(self) -> Any:
        return SimpleNamespace(ftype=0, allow_requantize=False, nthread=0)

    def llama_model_quantize(self, source: bytes, target: bytes, how: Any) -> int:
        self.written.append((source, target, how))
        Path(os.fsdecode(target)).write_bytes(b"GGUF")
        return 0 if source != b"bad.gguf" else 1

    def Llama(self, path: str, **given: Any) -> Any:
        assert Path(path).read_bytes() == b"GGUF"
        self.given = given
        return self

    def reset(self) -> None:
        self.resets += 1

    def generate(self, prompt: list[int], temp: float) -> Iterator[int]:
        assert prompt == [3, 4, 5, 6, 7, 8, 9, 10] and temp == 0.0
        yield from range(10**9)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("form", "number"), [("F16", 1), ("Q8_0", 7)])
def test_llama_cpp_runs_beside_where_it_is(form: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Llama()
    monkeypatch.setitem(sys.modules, "llama_cpp", module)  # type: ignore[arg-type]
    work = llamacpp.LlamaWork(gguf="model.gguf", form=form, tokens=6)
    ((source, target, how),) = module.written
    assert source == b"model.gguf" and (how.ftype, how.allow_requantize, how.nthread) == (number, True, 1)
    assert module.given["n_threads"] == 1 and module.given["n_ctx"] > 8 + 6
    assert not Path(os.fsdecode(target)).exists(), "what was written is gone"
    assert work.run(tokens=6)["tokens"] == 6 and module.resets == 1
    work.close()
    assert module.closed
    with pytest.raises(RuntimeError, match=r"cannot write bad.gguf as F16"):
        llamacpp.LlamaWork(gguf="bad.gguf", form="F16", tokens=6)


def test_why_llama_cpp_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "not installed" in llamacpp.missing("model.gguf")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    assert "GGUF" in llamacpp.missing("") and llamacpp.missing("model.gguf") == ""
    assert gguf_of(str(tmp_path)) is None and gguf_of("x.GGUF") == Path("x.GGUF").absolute()


@pytest.mark.parametrize(("times", "within"), [(1.0, True), (2.0, False)])
def test_a_second_copy_of_the_weights_is_beyond_the_bound(
    times: float, within: bool, tiny: Callable[[str], Path]
) -> None:
    held = 1000 * MIB
    meta = StageMeta(
        node=1,
        name="n",
        segments="blocks 1–2",
        blocks=[1, 2],
        parameters=1,
        resident_bytes=held,
        dtype="float32",
        device="cpu",
        threads=1,
        compute="fast",
        construct_ms=0.0,
        read_ms=0.0,
        assign_ms=0.0,
        read_kind="pread",
        import_rss_mb=300.0,
        versions={},
    )
    end = Final(
        node=1,
        tokens=1,
        peak_rss_mb=300 + times * held / MIB + 60,
        import_rss_mb=300.0,
        compute_ms=0.0,
        recv_wait_ms=0.0,
        queue_ms=0.0,
        send_ms=0.0,
        bytes_in=0,
        bytes_out=0,
    )
    files = ModelFiles(tiny("llama"))
    share = stage_shares(files, [meta, end], 1)["1"]
    assert (share <= 1) == within
    largest = 4 * 96 * 64
    activations = 4 * (4 * 64 + 3 * 96 + 2 * 4 * 2)
    bound = 1.1 * held + BUFFERS + largest + activations
    assert share == pytest.approx((times * held + 60 * MIB) / bound, rel=1e-9)
    assert stage_shares(files, [meta], 1) == {}


def test_goals_go_with_the_engine_that_runs() -> None:
    assert compute.UNCUT["fast"] == Goal(">=", 3.0, 3.6) and compute.UNCUT["int8 (native)"].reach == 4.0


def test_an_engine_that_is_not_here_is_not_measured(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``exact`` in its place would be taken for it."""
    from splitlm.model.compute import choice

    monkeypatch.setattr(choice, "choose", lambda asked: Choice("exact", "no such products"))
    with pytest.raises(UsageError, match=r"cannot run the engine 'fast' \(no such products\)|cannot run the engine"):
        measure(compute.COMPARISONS, str(tiny("llama")), ["uncut"], tokens=4, repetitions=1, compute="fast")


def test_what_bench_ring_cannot_measure_is_a_usage_error() -> None:
    done = run("bench", "ring", "--compute", "float7", "--no-trace")
    assert done.code == 2 and "exact, fast, int8, int4" in done.paragraph
    done = run("bench", "ring", "--compute", "fast", "--only", "cores", "--no-trace")
    assert done.code == 2 and "uncut, stream, batch, start" in done.paragraph
