"""A model's weights and KV as counted without reading them, against stages that hold them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from splitlm.core.cut import Segment
from splitlm.model.load import ModelFiles
from splitlm.model.profile import identity, model_profile
from splitlm.model.stage import Stage, build_stages
from tests.tiny import BLOCKS, FAMILIES, WINDOW


def weights(stage: Stage) -> int:
    return sum({p.data_ptr(): p.nbytes for p in stage.part.module.parameters()}.values())


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_counted_bytes_are_those_that_a_stage_holds(tiny: Callable[[str], Path], family: str, dtype: str) -> None:
    files = ModelFiles(tiny(family), dtype=dtype)
    profile = model_profile(files, family, "exact")
    two, front, back = build_stages(
        files, [Segment(1, 3), Segment(0, 0, embed=True), Segment(BLOCKS, BLOCKS, head=True)]
    )
    assert profile.blocks == BLOCKS
    assert 2 * profile.block_bytes == weights(two)
    assert profile.embed_bytes == weights(front)
    assert profile.head_bytes == weights(back)
    (whole,) = build_stages(files, [Segment(0, BLOCKS, embed=True, head=True)])
    total = BLOCKS * profile.block_bytes + profile.embed_bytes + profile.head_bytes - profile.tied_bytes
    assert total == weights(whole)
    assert profile.hidden_bytes == two.hidden * files.dtype.itemsize

    rows = 3 * WINDOW
    two.open(1)
    two.forward(1, torch.zeros(1, rows, files.hidden, dtype=files.dtype), 0)
    windows = profile.windows or (0,) * BLOCKS
    held = sum(min(rows, windows[i]) if windows[i] else rows for i in two.segment.blocks)
    assert two.kv_bytes(1) == profile.kv_bytes * held


def test_windows_are_there_only_where_a_block_slides(tiny: Callable[[str], Path]) -> None:
    assert model_profile(ModelFiles(tiny("llama")), "m", "exact").windows == ()
    assert model_profile(ModelFiles(tiny("gemma2")), "m", "exact").windows == (WINDOW - 1, 0, WINDOW - 1, 0, WINDOW - 1)


def test_an_identity_tells_models_types_and_engines_apart(tiny: Callable[[str], Path]) -> None:
    llama = ModelFiles(tiny("llama"))
    others = [
        identity(ModelFiles(tiny("llama-untied")), "exact"),
        identity(ModelFiles(tiny("llama"), dtype="bfloat16"), "exact"),
        identity(llama, "fast"),
    ]
    assert identity(llama, "exact") not in others
    assert identity(ModelFiles(tiny("llama")), "exact") == identity(llama, "exact")
