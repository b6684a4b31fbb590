"""Which engine each node of a ring runs is said, and what it could not do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from splitlm.core.errors import UsageError
from splitlm.local import Ring
from splitlm.model.compute import choice
from splitlm.model.compute.products import HALF_MAX, KINDS, Kind, Trial
from splitlm.node.build import engines_in_words
from splitlm.telemetry.record import StageMeta
from splitlm.telemetry.sinks import read_trace
from tests.model.made import edit_tensors
from tests.tiny import build

PROMPT = [1, 40, 50, 60]


def said(model: Path, **settings: object) -> tuple[list[str], list[int]]:
    lines: list[str] = []
    with Ring(str(model), say=lines.append, threads=1, **settings) as ring:  # type: ignore[arg-type]
        return lines, ring.generate(PROMPT, max_new_tokens=8, ignore_eos=True).tokens


@pytest.mark.skipif(bool(KINDS["fast"].missing()), reason="this machine has no float16 products")
def test_each_node_runs_the_engine_it_was_asked_to(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    plain, tokens = said(tiny("llama"), stages=2)
    assert not [line for line in plain if line.startswith("engine")]
    trace = tmp_path / "trace"
    lines, mixed = said(tiny("llama"), stages=2, compute=("fast", "exact"), trace_dir=trace)
    assert "engines: fast → exact" in lines and mixed == tokens
    found = [
        record for path in sorted(trace.glob("*.jsonl")) for record in read_trace(path) if isinstance(record, StageMeta)
    ]
    assert [meta.compute for meta in found] == ["fast", "exact"]
    assert found[0].pack_ms > 0 and 0.9 < found[0].inexact <= 1 and not found[0].unpacked
    assert found[1].pack_ms == found[1].inexact == 0
    exact = tmp_path / "exact"
    said(tiny("llama"), stages=2, trace_dir=exact)
    metas = [record for path in sorted(exact.glob("*.jsonl")) for record in read_trace(path)]
    assert [m.parameters for m in metas if isinstance(m, StageMeta)] == [meta.parameters for meta in found]


def test_where_fast_does_not_work_exact_runs_and_says_why(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Kind, "trial", lambda self: Trial(None, "no such instruction"))
    lines, _ = said(tiny("llama"), stages=1, compute="fast")
    assert "node 0 runs exact, since it was asked to run fast (no such instruction)" in lines
    with pytest.raises(UsageError, match=r"cannot run the engine 'int8' \(no such instruction\)"):
        said(tiny("llama"), stages=1, compute="int8")


@pytest.mark.skipif(bool(KINDS["fast"].missing()), reason="this machine has no float16 products")
def test_steps_that_are_not_compiled_are_told(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("splitlm.node.build.prepare", lambda: "there is no C++ compiler.")
    for compute, uncompiled in (("fast", "there is no C++ compiler."), ("exact", "")):
        lines, _ = said(tiny("llama"), stages=1, compute=compute, trace_dir=tmp_path / compute)
        slower = "node 0 computes more slowly than it could: there is no C++ compiler"
        assert (slower in lines) == bool(uncompiled)
        (path,) = (tmp_path / compute).glob("trace-node*.jsonl")
        (meta,) = [record for record in read_trace(path) if isinstance(record, StageMeta)]
        assert meta.uncompiled == uncompiled


def test_what_all_nodes_say_is_said_once() -> None:
    alike = {0: ("fast", "is slow"), 1: ("fast", "is slow")}
    assert engines_in_words(alike) == ["every node is slow", "engine: fast"]
    assert engines_in_words({0: ("fast", "is slow")}) == ["node 0 is slow", "engine: fast"]
    assert engines_in_words({0: ("fast", ""), 1: ("exact", "is slow")}) == ["node 1 is slow", "engines: fast → exact"]
    assert engines_in_words({0: ("exact", ""), 1: ("exact", "")}) == []


def test_an_engine_that_there_is_not(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match="compute is 'quick'"):
        said(tiny("llama"), stages=1, compute="quick")
    with pytest.raises(UsageError, match="There is no engine 'quick'"):
        choice.choose("quick")


@pytest.mark.skipif(bool(KINDS["fast"].missing()), reason="this machine has no float16 products")
def test_a_matrix_that_stays_in_float32_is_named(tmp_path: Path) -> None:
    def grown(tensors: dict[str, object]) -> dict[str, object]:
        tensors["model.layers.3.mlp.down_proj.weight"][3, 4] = -2 * HALF_MAX  # type: ignore[index]
        return tensors

    folder = edit_tensors(build("llama", tmp_path), grown)
    lines, _ = said(folder, stages=2, compute="fast", cuts=(2,))
    assert [line for line in lines if line.startswith("node 1 a matrix stays in float32: it holds 131008")]
