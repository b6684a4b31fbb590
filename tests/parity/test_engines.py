"""Engines with packed weights give the logits of the modules they were packed from, alone and beside others.

The models' weights are rounded to float16 first, as those of published checkpoints mostly are: what is compared is how
an engine computes. What rounding does to other weights is measured, not asserted (``splitlm check equivalence``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from splitlm.core.cut import make_cut
from splitlm.model.compute.base import Job
from splitlm.model.compute.fast import FusedEngine
from splitlm.model.compute.fused import LAYOUTS, Turn
from splitlm.model.compute.native.decoder import Decoder, decoder
from splitlm.model.compute.products import HALF_BLOCK, HALF_MAX, KINDS, HalfProduct, PlainProduct, products
from splitlm.model.load import ModelFiles
from splitlm.model.stage import Stage, Step, build_stages
from tests.model.made import edit_config, edit_tensors, make
from tests.model.test_families import ROWS
from tests.tiny import FAMILIES, VOCAB, build

pytestmark = pytest.mark.skipif(bool(KINDS["fast"].missing()), reason="this machine has no float16 products")
TOKENS = 120
PROMPT = 50
LONG = 306
"""So many tokens leave 256 rows of decoding."""
BOUND = 5e-4
FUSED = {"llama", "gpt2", "gemma2", "gemma3", "qwen2", "qwen3", "mistral"}


def rounded(folder: Path) -> Path:
    """Its weights are numbers of float16 from now on."""
    return edit_tensors(folder, lambda tensors: {key: t.half().to(t.dtype) for key, t in tensors.items()})


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``half(name)``: a model of ``tests.tiny`` or ``tests.model.test_families``, its weights in float16's grid."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("half")
            if name == "gpt2":  # whose positions are a table
                kind, options = FAMILIES[name]
                make(folder, kind, {**options, "n_positions": LONG + 8})
            elif name in FAMILIES:
                edit_config(build(name, folder), max_position_embeddings=LONG + 8)
            else:
                make(folder, *ROWS[name])
            made[name] = rounded(folder)
        return made[name]

    return get


def whole(folder: Path, compute: str, dtype: str = "float32") -> Stage:
    files = ModelFiles(folder, dtype=dtype)
    (stage,) = build_stages(files, make_cut(files.blocks, ()).segments, compute=compute)
    return stage


def some_ids(seed: int, count: int = TOKENS) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits(stages: Sequence[Stage], ids: Sequence[int], session: int = 1) -> torch.Tensor:
    """Of the last prompt row and every row after it, the ids given."""
    for stage in stages:
        stage.open(session)
    found = []
    for begin, end in [(0, 20), (20, PROMPT), *((i, i + 1) for i in range(PROMPT, len(ids)))]:
        out: torch.Tensor | None = torch.tensor([list(ids[begin:end])])
        for stage in stages:
            assert out is not None
            out = stage.forward(session, out, begin, logits=True)
        assert out is not None
        found.append(out.float())
    for stage in stages:
        stage.close(session)
    return torch.stack(found[1:])


@pytest.mark.parametrize("name", [*FAMILIES, *ROWS])
def test_fast_gives_the_logits_of_exact(name: str, half: Callable[[str], Path]) -> None:
    true, stage = whole(half(name), "exact"), whole(half(name), "fast")
    ids = some_ids(1, LONG if name in FAMILIES else TOKENS)
    a, b = logits([true], ids), logits([stage], ids)
    assert (a - b).abs().max() <= BOUND
    assert torch.equal(a.argmax(-1), b.argmax(-1))
    assert stage.packing is not None and stage.packing.packed and not stage.packing.left
    kind = (FAMILIES.get(name) or ROWS[name])[0].removesuffix("_text")
    assert isinstance(stage.engine, FusedEngine) == (kind in FUSED)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_a_table_that_is_the_head_too_is_held_in_sixteen_bits_twice(name: str, half: Callable[[str], Path]) -> None:
    """What both take is what the table took; on a private ring's head as well."""
    files = ModelFiles(half(name), dtype="float32")
    first, _, last = make_cut(files.blocks, (2,), private=True).segments
    for segments in ([make_cut(files.blocks, ()).segments[0]], [first, last]):
        packed = build_stages(files, segments, compute="fast")
        table = packed[0].part.module.get_input_embeddings()
        (head,) = products(packed[-1].part.module.get_output_embeddings())
        assert table.weight.dtype is torch.float16 and table.weight.shape == (VOCAB, files.hidden)
        assert head.nbytes == VOCAB * HALF_BLOCK * 2 and head.elements == 0
    (alone,) = build_stages(files, [last], compute="fast")
    (head,) = products(alone.part.module.get_output_embeddings())
    assert head.elements == VOCAB * files.hidden


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_in_bfloat16_it_is_nearer_to_float32_than_exact_is(name: str, half: Callable[[str], Path]) -> None:
    ids = some_ids(2)
    true = logits([whole(half(name), "exact")], ids)
    off = [(logits([whole(half(name), c, "bfloat16")], ids) - true).abs().mean() for c in ("exact", "fast")]
    assert 0 < off[1] < off[0]


@pytest.mark.parametrize("mutant", ["position", "mask", "norm"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_mutants_show(name: str, mutant: str, half: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    true, stage = whole(half(name), "exact"), whole(half(name), "fast")
    assert isinstance(stage.engine, FusedEngine)
    if mutant == "position":
        turn = stage.engine._turn

        def late(kind: str | None, jobs: Sequence[Job]) -> Turn:
            return turn(kind, [replace(job, position=job.position + (job.position > PROMPT)) for job in jobs])

        monkeypatch.setattr(stage.engine, "_turn", late)
    elif mutant == "mask":
        monkeypatch.setattr("splitlm.model.compute.fused.visible", lambda rows, keys, window: None)
    else:
        block = next(iter(stage.part.module.model.layers))
        block.before_mlp.weight.data += 0.5
    ids = some_ids(1)
    assert (logits([true], ids) - logits([stage], ids)).abs().max() > 4 * BOUND


@pytest.mark.parametrize("compute", ["fast", "int8"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gemma3", "qwen3", "mistral"])
def test_who_shares_a_step_changes_no_bit(name: str, compute: str, half: Callable[[str], Path]) -> None:
    """Ragged: sessions of different lengths, from one to eight of them, and a prompt among them."""
    stages = build_stages((files := ModelFiles(half(name))), make_cut(files.blocks, (2,)).segments, compute=compute)
    if stages[0].engine.width == 1:
        pytest.skip(f"{stages[0].engine.name} shares no step")
    prompts = [some_ids(10 + i, 3 + 5 * i) for i in range(8)]
    tokens = some_ids(30, 8)

    def start() -> None:
        for session, prompt in enumerate(prompts):
            for stage in stages:
                stage.close(session)
                stage.open(session)
            inner = stages[0].forward(session, torch.tensor([prompt]), 0)
            assert inner is not None
            stages[1].forward(session, inner, 0)

    def step(together: Sequence[int]) -> list[torch.Tensor | None]:
        steps = [Step(s, torch.tensor([[tokens[s]]]), len(prompts[s])) for s in together]
        inner = stages[0].forward_many(steps)
        return stages[1].forward_many(
            [Step(s.session, h, s.position, True) for s, h in zip(steps, inner, strict=True) if h is not None]
        )

    start()
    alone = [step([session])[0] for session in range(8)]
    for width in range(2, 9):
        start()
        for found, true in zip(step(range(width)), alone, strict=False):
            assert found is not None and true is not None and torch.equal(found, true)
    start()
    stages[0].open(99)
    one = Step(0, torch.tensor([[tokens[0]]]), len(prompts[0]))
    mixed = stages[0].forward_many([one, Step(99, torch.tensor([some_ids(50, 9)]), 0)])
    start()
    (plain,) = stages[0].forward_many([one])
    assert mixed[0] is not None and plain is not None and torch.equal(mixed[0], plain)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "qwen3"])
def test_without_a_compiler_it_is_the_same_engine(
    name: str, half: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitlm.model.compute.fused.decoder", lambda: None)
    true, stage = whole(half(name), "exact"), whole(half(name), "fast")
    assert isinstance(stage.engine, FusedEngine)
    assert (logits([true], some_ids(1)) - logits([stage], some_ids(1))).abs().max() <= BOUND
    test_who_shares_a_step_changes_no_bit(name, "fast", half)


@pytest.mark.skipif(decoder() is None, reason="this machine has no C++ compiler")
@pytest.mark.parametrize("mutant", ["attend", "norm", "activate"])
def test_compiled_steps_that_are_wrong_show(
    mutant: str, half: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block's trial sees each of them, those of a single row too."""
    assert isinstance(whole(half("llama"), "fast").engine, FusedEngine)
    real = getattr(Decoder, mutant)

    def off(self: Decoder, *given: Any) -> Any:
        if mutant == "attend":
            real(self, *given)
            if given[5] > 8:  # as if what does more than eight rows at once were wrong
                ctypes.memset(given[6], 0, 4)
            return None
        return real(self, *given) * 1.1

    monkeypatch.setattr(Decoder, mutant, off)
    assert "linear layers only" in whole(half("llama"), "fast").engine.name


@pytest.mark.parametrize("engines", [("exact", "fast"), ("fast", "exact")])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_a_session_moves_between_engines(name: str, engines: tuple[str, str], half: Callable[[str], Path]) -> None:
    """One block and its KV go from the first stage to the second in the middle of a text."""
    files = ModelFiles(half(name))
    ids = some_ids(1)
    true = logits([whole(half(name), "exact")], ids)
    cut, moved = make_cut(files.blocks, (3,)), make_cut(files.blocks, (2,))
    stages = [
        build_stages(files, [segment], compute=engine)[0] for segment, engine in zip(cut.segments, engines, strict=True)
    ]
    for stage in stages:
        stage.open(1)
    found = []
    for begin, end in [(0, 20), (20, PROMPT), *((i, i + 1) for i in range(PROMPT, len(ids)))]:
        if begin == 80:
            coming = dict(zip([2], stages[1].load_blocks([2], {}), strict=True))
            left = stages[0].change(moved.segments[0], {}, {})
            stages[1].change(moved.segments[1], coming, left.kv)
            assert left.release() > 0
        inner = stages[0].forward(1, torch.tensor([ids[begin:end]]), begin)
        assert inner is not None
        out = stages[1].forward(1, inner, begin, logits=True)
        assert out is not None
        found.append(out)
    assert (torch.stack(found[1:]) - true).abs().max() <= BOUND


def test_a_weight_beyond_float16_stays_as_it_is(half: Callable[[str], Path], tmp_path: Path) -> None:
    folder = build("llama", tmp_path)

    def grown(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = 2 * HALF_MAX
        return {key: t.half().float() if "layers.1.mlp.down" not in key else t for key, t in tensors.items()}

    edit_tensors(folder, grown)
    stage = whole(folder, "fast")
    assert stage.packing is not None and len(stage.packing.left) == 1 and "131008" in stage.packing.left[0]
    assert [isinstance(p, PlainProduct) for p in products(stage.part.module)].count(True) == 1
    a, b = logits([whole(folder, "exact")], some_ids(1)), logits([stage], some_ids(1))
    assert (a - b).abs().max() <= BOUND * max(1.0, float(a.abs().max()) / 10)


def test_a_block_that_computes_something_else_is_not_fused(
    half: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a future transformers changes is found when the first block is packed."""
    monkeypatch.setitem(LAYOUTS, "LlamaDecoderLayer", LAYOUTS["GPT2Block"])
    stage = whole(half("llama"), "fast")
    assert not isinstance(stage.engine, FusedEngine) and "linear layers only" in stage.engine.name
    monkeypatch.undo()
    layout = LAYOUTS["LlamaDecoderLayer"]
    monkeypatch.setitem(LAYOUTS, "LlamaDecoderLayer", type(layout)(gain=0.5))
    stage = whole(half("llama"), "fast")
    assert not isinstance(stage.engine, FusedEngine)
    ids = some_ids(1)
    assert (logits([whole(half("llama"), "exact")], ids) - logits([stage], ids)).abs().max() <= BOUND


@pytest.mark.parametrize("compute", ["int8", "int4"])
@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_fewer_bits_are_near(compute: str, name: str, half: Callable[[str], Path]) -> None:
    if why := KINDS[compute].missing():
        pytest.skip(f"{compute} does not work here: {why}")
    ids = some_ids(1)
    a, b = logits([whole(half(name), "exact")], ids), logits([whole(half(name), compute)], ids)
    off = (a - b).abs().mean() / a.std()
    assert BOUND < off < {"int8": 0.1, "int4": 0.6}[compute]


@pytest.mark.parametrize("compute", ["int8", "int4"])
def test_fewer_bits_leave_the_head_its_sixteen_where_it_can_have_them(
    compute: str, half: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := KINDS[compute].missing():
        pytest.skip(f"{compute} does not work here: {why}")

    def packed(folder: Path) -> tuple[type, set[type]]:
        stage = whole(folder, compute)
        assert stage.packing is not None and not stage.packing.left
        head = stage.part.module.lm_head.product
        return type(head), {type(product) for product in products(stage.part.module) if product is not head}

    head, blocks = packed(half("llama"))
    assert head is HalfProduct and len(blocks) == 1 and head not in blocks

    def grown(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors["lm_head.weight"][3, 4] = 2 * HALF_MAX
        return tensors

    head, blocks = packed(edit_tensors(build("llama-untied", tmp_path), grown))
    assert {head} == blocks

    def missing(*_: Any) -> None:
        raise RuntimeError("no FBGEMM here")

    monkeypatch.setattr(HalfProduct, "__init__", missing)
    head, blocks = packed(half("llama"))
    assert {head} == blocks
