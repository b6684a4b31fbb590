"""What a ring may be asked to be."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from splitlm import Ring
from splitlm.core.errors import UsageError
from splitlm.model.runner import MAX_THREADS
from splitlm.node.settings import RingSettings, StageSettings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loader", "mmap"),
        ("compute", "quick"),
        ("threads", -1),
        ("threads", MAX_THREADS + 1),
        ("threads", 3_000_000_000),
        ("threads", 1.5),
        ("threads", True),
        ("pace_ms", -1.0),
        ("pace_ms", math.nan),
        ("prefill_chunk", 0),
        ("deadline_s", 0.0),
        ("deadline_s", math.inf),
        ("ctrl_timeout_s", -1.0),
        ("ctrl_timeout_s", math.nan),
    ],
)
def test_a_value_that_no_ring_can_have_is_named(name: str, value: object, stories: Path) -> None:
    """Also where no command line checked it: nothing is taken for something else, nor found out later."""
    with pytest.raises(UsageError, match=f"{name} is .*Expected"):
        RingSettings(model="m", folder=Path("m"), **{name: value})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=f"{name} is "):
        Ring(str(stories), **{name: value}).open()  # type: ignore[arg-type]


def test_the_values_at_the_edge_are_fine() -> None:
    RingSettings(model="m", folder=Path("m"), loader="hf", threads=0, pace_ms=0.0, prefill_chunk=1, deadline_s=1e-3)
    RingSettings(model="m", folder=Path("m"), threads=MAX_THREADS)


@pytest.mark.parametrize("threads", [-1, MAX_THREADS + 1, 2**70])
def test_a_stage_takes_no_more_threads_than_a_ring(threads: int) -> None:
    def stage(threads: int) -> StageSettings:
        return StageSettings(("127.0.0.1", 1), Path, threads=threads)

    assert stage(MAX_THREADS).threads == MAX_THREADS
    with pytest.raises(UsageError, match=f"^--threads: threads is {threads}. Expected .* 0 to {MAX_THREADS}"):
        stage(threads)
