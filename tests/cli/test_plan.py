"""``splitlm plan``: arithmetic that anyone can check."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import splitlm
from splitlm.core.errors import CutError, UsageError

from .command import run

MIB = 2**20
LLAMA_1B: Mapping[str, object] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
LLAMA_3B = {**LLAMA_1B, "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128}


@pytest.fixture
def config_only(tmp_path: Path) -> Callable[[Mapping[str, object]], Path]:
    """A directory that has nothing but a config.json."""

    def make(config: Mapping[str, object]) -> Path:
        folder = tmp_path / "shape"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


def test_the_one_billion_shape(config_only: Callable[[Mapping[str, object]], Path]) -> None:
    """A block is 2·2048² + 2·2048·512 + 3·2048·8192 + 2·2048 parameters; the table is on both ends."""
    plan = splitlm.plan(config_only(LLAMA_1B), cuts=(6, 11))
    block, table, norm = 60_821_504, 128256 * 2048, 2048
    assert block == 2 * 2048**2 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048
    assert [s.parameters for s in plan.stages] == [table + 6 * block, 5 * block, 5 * block + norm + table]
    assert [s.weight_bytes for s in plan.stages] == [2 * s.parameters for s in plan.stages]
    assert [round(s.weight_bytes / MIB) for s in plan.stages] == [1197, 580, 1081]
    assert [s.kv_bytes_per_token for s in plan.stages] == [6 * 2048, 5 * 2048, 5 * 2048]
    assert [s.kv_cap_bytes for s in plan.stages] == [n * 2048 * 131072 for n in (6, 5, 5)]
    assert (plan.dtype, plan.weights, plan.window, plan.context) == ("bfloat16", False, None, 131072)


def test_the_three_billion_shape(config_only: Callable[[Mapping[str, object]], Path]) -> None:
    """KV of a block: 2 · 8 heads · 128 · 2 bytes."""
    plan = splitlm.plan(config_only(LLAMA_3B), stages=28)
    assert {s.kv_bytes_per_token for s in plan.stages} == {4096}


def test_a_private_cut_holds_the_tied_table_once(config_only: Callable[[Mapping[str, object]], Path]) -> None:
    """The head's node has embedding and head: one table; the untied model has two."""
    folder, options = config_only(LLAMA_1B), {"cuts": (6, 11), "private": True}
    block, table, norm = 60_821_504, 128256 * 2048, 2048
    tied = splitlm.plan(folder, **options)  # type: ignore[arg-type]
    assert [s.parameters for s in tied.stages] == [table + norm + 6 * block, 5 * block, 5 * block]
    assert tied.stages[0].blocks == (0, 1, 2, 3, 4, 5)
    untied = splitlm.plan(config_only({**LLAMA_1B, "tie_word_embeddings": False}), **options)  # type: ignore[arg-type]
    assert untied.stages[0].parameters == tied.stages[0].parameters + table
    tail = splitlm.plan(config_only(LLAMA_1B), stages=2, private=True, tail_blocks=2)
    assert tail.stages[0].blocks[-2:] == (14, 15) and tail.stages[1].blocks[-1] == 13


def test_dtype_scales_bytes_alone(config_only: Callable[[Mapping[str, object]], Path]) -> None:
    """float32 is twice bfloat16, in weights and KV."""
    folder = config_only(LLAMA_1B)
    narrow, wide = splitlm.plan(folder, stages=2), splitlm.plan(folder, stages=2, dtype="float32")
    for a, b in zip(narrow.stages, wide.stages, strict=True):
        assert a.parameters == b.parameters
        assert (b.weight_bytes, b.kv_bytes_per_token) == (2 * a.weight_bytes, 2 * a.kv_bytes_per_token)
    with pytest.raises(UsageError, match="float7"):
        splitlm.plan(folder, dtype="float7")


def test_sliding_blocks_stop_at_their_window(tiny: Callable[[str], Path]) -> None:
    """tests.tiny: five blocks, window 8, the third and the fifth of gemma3 attend to all 128 tokens."""
    plan = splitlm.plan(tiny("gemma3"), stages=2, cuts=(2,))
    row = 2 * 2 * 16 * 4
    assert plan.window == 8
    assert [s.kv_bytes_per_token for s in plan.stages] == [2 * row, 3 * row]
    assert [s.kv_cap_bytes for s in plan.stages] == [2 * 7 * row, (128 + 7 + 128) * row]


@pytest.mark.parametrize("family", ["llama", "llama-untied", "gpt2", "gemma3", "qwen3"])
def test_a_plan_is_what_a_ring_loads(family: str, tiny: Callable[[str], Path]) -> None:
    """Parameters and bytes of every node, counted on the loaded modules."""
    import torch

    from splitlm.model.load import ModelFiles

    folder = tiny(family)
    plan, files = splitlm.plan(folder, stages=3, private=True), ModelFiles(folder)
    assert plan.weights
    for stage in plan.stages:
        parts = files.load(plan.cut.held_by(stage.node))
        held = {p.data_ptr(): p for part in parts for p in part.module.parameters()}
        assert stage.parameters == sum(p.numel() for p in held.values())
        assert stage.weight_bytes == sum(p.nbytes for p in held.values())
    assert plan.dtype == str(torch.float32).removeprefix("torch.")


@pytest.mark.parametrize("family", ["llama", "llama-untied", "gpt2", "gemma3"])
def test_config_and_weights_give_one_balance(family: str, tiny: Callable[[str], Path]) -> None:
    """A cut that was planned from the config alone is the one that the ring chooses from its files."""
    from splitlm.model.load import ModelFiles
    from splitlm.model.sizes import ModelShape

    folder = tiny(family)
    for dtype in ("auto", "bfloat16"):
        costs = [opened(folder, dtype=dtype).head_cost for opened in (ModelShape, ModelFiles)]
        assert costs[0] == pytest.approx(costs[1], rel=1e-12) and costs[0] > 0


def test_the_command_prints_it(config_only: Callable[[Mapping[str, object]], Path]) -> None:
    """As a table, and as JSON with the same numbers."""
    folder = config_only(LLAMA_1B)
    shown = run("plan", folder, "--cuts", "6,11")
    assert shown.code == 0
    for text in ("cuts 6,11", "1,197.0 MiB", "580.0 MiB", "1,081.0 MiB", "627,597,312", "12.0 KiB", "131,072 tokens"):
        assert text in shown.out, shown.out
    data = json.loads(run("plan", folder, "--cuts", "6,11", "--json", "--quiet").out)
    assert data["cuts"] == [6, 11] and data["blocks"] == 16
    assert [s["kv_bytes_per_token"] for s in data["stages"]] == [12288, 10240, 10240]
    private = json.loads(run("plan", folder, "--stages", "3", "--private", "--json").out)
    again = splitlm.plan(folder, cuts=private["cuts"], private=True)
    assert [list(s.blocks) for s in again.stages] == [s["blocks"] for s in private["stages"]]


def test_a_tied_table_that_is_counted_twice_is_told(config_only: Callable[[Mapping[str, object]], Path]) -> None:
    """Not where one node holds both ends, nor where embedding and head are two tables."""
    table, folder = 128256 * 2048 * 2, config_only(LLAMA_1B)
    note = "share one table of 501.0 MiB: the first and the last stage hold a copy each, and all counts both"
    shown = run("plan", folder, "--cuts", "6,11").out
    assert note in shown and splitlm.plan(folder, cuts=(6, 11)).twice_bytes == table
    assert json.loads(run("plan", folder, "--stages", "2", "--json").out)["twice_bytes"] == table
    for words in (("--stages", "1"), ("--stages", "3", "--private")):
        assert "share one table" not in run("plan", folder, *words).out
    untied = splitlm.plan(config_only({**LLAMA_1B, "tie_word_embeddings": False}), stages=3)
    assert untied.twice_bytes == 0


def test_a_plan_that_cannot_be_is_refused(config_only: Callable[[Mapping[str, object]], Path]) -> None:
    """More stages than blocks."""
    with pytest.raises(CutError, match="17 stages"):
        splitlm.plan(config_only(LLAMA_1B), stages=17)


def test_no_room_takes_the_name_of_a_public_function() -> None:
    """``splitlm.plan`` is a function: a package of that name would shadow it as soon as it is imported."""
    package = Path(splitlm.__file__).parent
    taken = [name for name in splitlm.__all__ if (package / name).is_dir() or (package / f"{name}.py").exists()]
    assert taken == []
    code = "import splitlm, splitlm.node.plan, splitlm.cli.plan; assert callable(splitlm.plan)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
