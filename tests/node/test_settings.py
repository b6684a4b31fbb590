"""What a ring may be asked to be."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from splitlm import Ring
from splitlm.core.errors import UsageError
from splitlm.node.settings import RingSettings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loader", "mmap"),
        ("compute", "quick"),
        ("threads", -1),
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
