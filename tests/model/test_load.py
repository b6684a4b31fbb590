"""Only what a segment holds is built, read and kept; every lie of a config is found."""

from __future__ import annotations

import copy
import gc
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from splitlm.core.cut import Segment, make_cut
from splitlm.core.errors import CheckpointError, ModelError, UnknownFamilyError, UsageError
from splitlm.model import load as loading
from splitlm.model import residency, skeleton
from splitlm.model.family import find_family
from splitlm.model.index import CheckpointIndex
from splitlm.model.load import BLOCK_BYTES, Loader, ModelFiles
from splitlm.model.stage import build_stages, resident_bytes
from tests.model.made import edit_config, edit_tensors, same_as_uncut
from tests.tiny import FAMILIES, HIDDEN, VOCAB

LOADERS: tuple[Loader, ...] = ("shard", "hf")
MIDDLE = Segment(1, 3)


@pytest.fixture
def folder(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the tiny Llama (tied), to be changed."""
    return Path(shutil.copytree(tiny("llama"), tmp_path / "model"))


def layer_names(files: ModelFiles) -> set[str]:
    return {key for key in files.index.entries if key.startswith(("model.layers.1.", "model.layers.2."))}


# What is built and read


def test_only_the_blocks_asked_for_are_built(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    made: list[int] = []
    init = LlamaDecoderLayer.__init__

    def count(self: Any, config: Any, layer_idx: int) -> None:
        made.append(layer_idx)
        init(self, config, layer_idx)

    monkeypatch.setattr(LlamaDecoderLayer, "__init__", count)
    files = ModelFiles(folder)
    files.load([MIDDLE])
    assert made == files.built == [1, 2]
    files.load_blocks([4])
    assert made == files.built == [1, 2, 4]


def test_only_the_tensors_of_the_segment_are_read_and_each_once(folder: Path) -> None:
    files = ModelFiles(folder)
    files.load([MIDDLE])
    assert sorted(files.index.reads) == sorted(layer_names(files))


@pytest.mark.parametrize("private", [False, True])
def test_a_whole_cut_reads_a_tied_table_once_per_node(private: bool, folder: Path) -> None:
    cut = make_cut(5, (1, 3), private=private)
    read: list[str] = []
    for node in range(cut.stages):
        files = ModelFiles(folder)
        files.load(cut.held_by(node))
        assert len(set(files.index.reads)) == len(files.index.reads)
        read += files.index.reads
    assert set(read) == set(files.index.entries)
    assert read.count("model.embed_tokens.weight") == (1 if private else 2)


def test_blocks_and_skeletons_are_not_kept_alive(folder: Path) -> None:
    files = ModelFiles(folder)
    (part,) = files.load([Segment(0, 3, embed=True)])
    held = [weakref.ref(block) for block in part.module.model.layers] + [weakref.ref(part.module)]
    storage = weakref.ref(part.module.model.layers[0].mlp.up_proj.weight)
    (block,) = files.load_blocks([4])
    held.append(weakref.ref(block))
    del part, block
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
    assert storage() is None


def test_each_call_makes_fresh_blocks(folder: Path) -> None:
    files = ModelFiles(folder)
    (part,) = files.load([MIDDLE])
    one, two = files.load_blocks([1])[0], files.load_blocks([1])[0]
    assert one is not two
    pointers = [{p.data_ptr() for p in b.parameters()} for b in (one, two, part.module.model.layers[0])]
    assert not pointers[0] & pointers[1] and not pointers[0] & pointers[2]
    for a, b in zip(one.state_dict().values(), part.module.model.layers[0].state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_a_factory_that_returns_a_used_block_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    files = ModelFiles(folder)
    used = files.load_blocks([1])[0]
    monkeypatch.setattr(modeling_llama, "LlamaDecoderLayer", lambda config, layer_idx: used)
    with pytest.raises(ModelError, match="Block 1 came with values in it"):
        ModelFiles(folder).load([MIDDLE])


def test_building_blocks_sets_nothing_of_the_process(folder: Path) -> None:
    """A thread that computes meanwhile must not see another default type."""
    files = ModelFiles(folder, dtype="bfloat16")
    files.load_blocks([0])
    seen: set[torch.dtype] = set()
    going = True

    def watch() -> None:
        while going:
            seen.add(torch.get_default_dtype())

    thread = threading.Thread(target=watch)
    thread.start()
    for _ in range(5):
        (block,) = files.load_blocks([1])
    going = False
    thread.join()
    assert seen == {torch.float32}
    assert {p.dtype for p in block.parameters()} == {torch.bfloat16}


# Memory


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_parameters_are_aligned_frozen_and_of_the_type_asked_for(
    family: str, dtype: str, loader: Loader, tiny: Callable[[str], Path]
) -> None:
    files = ModelFiles(tiny(family), dtype=dtype)
    for part in files.load(make_cut(5, (1, 3)).segments, loader):
        for param in part.module.parameters():
            assert param.data_ptr() % 64 == 0
            assert param.dtype == files.dtype and not param.requires_grad and param.is_contiguous()
        assert not part.module.training


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_one_node_holds_a_tied_table_once(family: str, loader: Loader, tiny: Callable[[str], Path]) -> None:
    files = ModelFiles(tiny(family))
    cut = make_cut(5, (1, 3), private=True)
    stages = build_stages(files, cut.held_by(0), loader=loader)
    base = getattr(stages[0].part.module, files.family.base)
    table, head = getattr(base, files.family.embed).weight, stages[1].part.module.lm_head.weight
    assert table.data_ptr() == head.data_ptr()
    apart = [build_stages(ModelFiles(tiny(family)), [s], loader=loader) for s in cut.held_by(0)]
    assert sum(map(resident_bytes, apart)) - resident_bytes(stages) == VOCAB * HIDDEN * 4
    (whole,) = build_stages(files, make_cut(5, ()).segments, loader=loader)
    entries = files.index.entries
    assert whole.part.parameters == sum(torch.Size(e.shape).numel() for e in entries.values())


@pytest.mark.parametrize("loader", LOADERS)
def test_an_untied_head_is_a_table_of_its_own(loader: Loader, tiny: Callable[[str], Path]) -> None:
    files = ModelFiles(tiny("llama-untied"))
    front, tail = build_stages(files, make_cut(5, (1, 3), private=True).held_by(0), loader=loader)
    assert not torch.equal(front.part.module.model.embed_tokens.weight, tail.part.module.lm_head.weight)


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_both_loaders_give_the_same(family: str, private: bool, tiny: Callable[[str], Path]) -> None:
    same_as_uncut(tiny(family), (1, 3), loader="hf", private=private, new=6)
    files = ModelFiles(tiny(family))
    cut = make_cut(5, (1, 3), private=private)
    for node in range(cut.stages):
        ours, theirs = (files.load(cut.held_by(node), loader) for loader in LOADERS)
        for a, b in zip(ours, theirs, strict=True):
            one, two = ({**dict(p.module.named_parameters()), **dict(p.module.named_buffers())} for p in (a, b))
            assert one.keys() == two.keys()
            assert all(torch.equal(one[name], two[name]) for name in one)
            assert a.windows == b.windows
    assert resident_bytes(build_stages(files, cut.held_by(1))) == resident_bytes(
        build_stages(files, cut.held_by(1), loader="hf")
    )


def test_the_hf_loader_does_not_use_the_shard_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ModelFiles(folder)
    monkeypatch.setattr(CheckpointIndex, "read", None)
    monkeypatch.setattr(loading, "build_skeleton", None)
    files.load([MIDDLE], "hf")
    assert files.index.reads == [] and files.built == []


# Residency: every check with a mutant


def test_a_buffer_of_an_unknown_kind_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    init = LlamaRMSNorm.__init__

    def more(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.register_buffer("strange", torch.ones(3), persistent=False)

    monkeypatch.setattr(LlamaRMSNorm, "__init__", more)
    with pytest.raises(CheckpointError, match=r"never filled.*input_layernorm\.strange"):
        ModelFiles(folder).load([MIDDLE])
    with pytest.raises(CheckpointError, match=r"never filled.*input_layernorm\.strange"):
        ModelFiles(folder).load_blocks([1])
    with pytest.raises(CheckpointError, match=r"model\.norm\.strange could not be computed"):
        ModelFiles(folder).load([Segment(3, 5, head=True)])


def test_a_buffer_of_whole_numbers_is_not_guessed() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("ids", torch.zeros(2, dtype=torch.int64, device="meta"), persistent=False)

        def _init_weights(self, module: nn.Module) -> None:
            pass

    with pytest.raises(CheckpointError, match="ids could not be computed"):
        skeleton.compute_buffers(Odd(), "here")


def test_a_tensor_of_another_segment_that_is_read_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = CheckpointIndex.read

    def greedy(self: CheckpointIndex, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        if key.startswith("model.layers.2.mlp.up"):
            read(self, "model.layers.4.mlp.up_proj.weight")
        return read(self, key, dtype)

    monkeypatch.setattr(CheckpointIndex, "read", greedy)
    with pytest.raises(ModelError, match=r"'model\.layers\.4\.mlp\.up_proj\.weight' was read and belongs to another"):
        ModelFiles(folder).load([MIDDLE])


def test_the_checks_of_names_and_reads() -> None:
    wanted = ["model.layers.1.", "model.norm."]
    residency.check_names(["model.layers.1.a", "model.norm.w"], wanted, "x")
    with pytest.raises(ModelError, match=r"No tensor begins with 'model\.norm\.'"):
        residency.check_names(["model.layers.1.a"], wanted, "x")
    with pytest.raises(ModelError, match=r"'model\.layers\.11\.a' belongs to no part"):
        residency.check_names(["model.layers.1.a", "model.norm.w", "model.layers.11.a"], wanted, "x")
    residency.check_reads(["b", "a"], ["a", "b"], "x")
    for reads, text in ((["a"], "'b' was never read"), (["a", "b", "a"], "'a' was read twice")):
        with pytest.raises(ModelError, match=text):
            residency.check_reads(reads, ["a", "b"], "x")


def test_prefixes_come_from_the_table_and_the_segment() -> None:
    gpt2 = find_family("gpt2")
    assert residency.prefixes(gpt2, Segment(0, 1, embed=True)) == [
        "transformer.wte.",
        "transformer.wpe.",
        "transformer.h.0.",
    ]
    assert residency.prefixes(gpt2, Segment(3, 3, head=True)) == ["transformer.ln_f.", "lm_head."]


def test_memory_that_is_not_aligned_is_found() -> None:
    module = nn.Linear(8, 8, bias=False)
    residency.check_aligned(module, "x")
    module.weight = nn.Parameter(torch.zeros(65)[1:].view(8, 8))
    with pytest.raises(ModelError, match="'weight' lies at an address"):
        residency.check_aligned(module, "x")


@pytest.mark.parametrize("loader", LOADERS)
def test_weights_in_a_module_that_the_table_does_not_know_are_refused(
    loader: Loader, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaModel

    init = LlamaModel.__init__

    def more(self: Any, config: Any) -> None:
        init(self, config)
        self.extra = nn.Linear(2, 2)

    monkeypatch.setattr(LlamaModel, "__init__", more)
    with pytest.raises((UnknownFamilyError, CheckpointError), match=r"model\.extra"):
        ModelFiles(folder).load([MIDDLE], loader)


# Config and tensors that do not agree


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("vocab_size", 130, ["embed_tokens.weight", "[128, 64]", "[130, 64]"]),
        ("intermediate_size", 100, ["mlp.", "[96, 64]", "[100, 64]"]),
        ("head_dim", 8, ["self_attn.", "[64, 64]", "[32, 64]"]),
        ("num_key_value_heads", 4, ["k_proj.weight", "[32, 64]", "[64, 64]"]),
        ("hidden_size", 128, ["[128, 64]", "[128, 128]"]),
    ],
)
def test_shapes_that_the_config_contradicts(
    field: str, value: int, words: list[str], loader: Loader, folder: Path
) -> None:
    files = ModelFiles(edit_config(folder, **{field: value}))
    with pytest.raises(CheckpointError) as caught:
        files.load(make_cut(5, (2,)).segments, loader)
    for word in words if loader == "shard" else []:
        assert word in str(caught.value)
    assert "model.safetensors" in str(caught.value) or loader == "hf"


def test_a_head_size_that_the_config_leaves_out(tmp_path: Path) -> None:
    from tests.model.made import make
    from tests.tiny import COMMON

    folder = make(tmp_path, "qwen3", {**COMMON, "head_dim": 32})
    with pytest.raises(CheckpointError, match=r"q_proj|k_proj|q_norm"):
        ModelFiles(edit_config(folder, head_dim=...)).load([MIDDLE])


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("key", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"])
def test_a_missing_tensor_is_named(key: str, loader: Loader, folder: Path) -> None:
    """transformers itself would fill it with noise and say so in a warning."""
    edit_tensors(folder, lambda tensors: {k: v for k, v in tensors.items() if k != key})
    with pytest.raises(CheckpointError, match=key.replace(".", r"\.")):
        ModelFiles(folder).load(make_cut(5, (2,)).segments, loader)


@pytest.mark.parametrize("count", [4, 6, ...])
def test_another_number_of_blocks(count: Any, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: num_hidden_layers is \d+ .* those of 5 blocks"):
        ModelFiles(edit_config(folder, num_hidden_layers=count))


def test_whole_numbers_where_weights_should_be(folder: Path) -> None:
    def quantize(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].to(torch.int8)
        return tensors

    with pytest.raises(CheckpointError, match=r"up_proj\.weight' has element type torch\.int8"):
        ModelFiles(edit_tensors(folder, quantize)).load([MIDDLE])


def test_quantized_models_are_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"quantization_config"):
        ModelFiles(edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4}))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": "5"}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": 5.5}, "num_hidden_layers"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_attention_heads": 0}, "config.json"),
        ({"num_attention_heads": 3}, "config.json"),
        ({"num_labels": 10**12}, "num_labels"),
        ({"hidden_act": "nonsense"}, "nonsense"),
        ({"rope_parameters": {"rope_type": "nonsense", "rope_theta": 1e4}}, "nonsense"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "config"),
        ({"rope_parameters": 5}, "rope_parameters"),
        ({"tie_word_embeddings": "maybe"}, "tie_word_embeddings"),
        ({"dtype": "nonsense"}, "nonsense"),
        ({"dtype": "float64"}, "float64"),
        ({"max_position_embeddings": [1]}, "max_position_embeddings"),
        ({"attn_implementation": "nonsense"}, "nonsense"),
    ],
)
def test_configs_that_no_model_has(fields: dict[str, Any], words: str, folder: Path) -> None:
    edit_config(folder, **fields)
    with pytest.raises(ModelError) as caught:
        ModelFiles(folder).load([MIDDLE])
    assert words in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "layer_types",
    [["full_attention"] * 4, [], "full_attention", ["nonsense"] * 5, [1] * 5, ["linear_attention"] * 5, {"a": 1}],
)
def test_kinds_of_layers_that_no_model_has(layer_types: Any, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = edit_config(Path(shutil.copytree(tiny("gemma2"), tmp_path / "m")), layer_types=layer_types)
    with pytest.raises(ModelError, match=r"config\.json.*(layer_types|layers)"):
        ModelFiles(folder)


@pytest.mark.parametrize("window", [0, 1, -4, "8"])
def test_windows_that_hold_nothing(window: Any, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = edit_config(Path(shutil.copytree(tiny("mistral"), tmp_path / "m")), sliding_window=window)
    with pytest.raises(ModelError, match="sliding_window"):
        ModelFiles(folder)


def test_a_config_never_runs_code_of_its_own(folder: Path, tmp_path: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    edit_config(folder, auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    for loader in LOADERS:
        ModelFiles(folder).load([MIDDLE], loader)
    assert not (tmp_path / "ran").exists()


# Element types and tied heads


def test_element_types(folder: Path) -> None:
    assert ModelFiles(folder).dtype == torch.float32
    assert ModelFiles(folder, dtype="bfloat16").dtype == torch.bfloat16
    with pytest.raises(UsageError, match="--dtype"):
        ModelFiles(folder, dtype="float8")
    edit_config(folder, dtype="bfloat16")
    with pytest.raises(CheckpointError, match=r"torch\.bfloat16 and the tensors are torch\.float32.*--dtype"):
        ModelFiles(folder)
    edit_config(folder, dtype=...)
    assert ModelFiles(folder).dtype == torch.float32

    def mix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors | {"model.norm.weight": tensors["model.norm.weight"].bfloat16()}

    edit_tensors(folder, mix)
    with pytest.raises(CheckpointError, match=r"torch\.bfloat16, torch\.float32"):
        ModelFiles(folder)
    (part,) = ModelFiles(edit_config(folder, dtype="float32")).load([Segment(3, 5, head=True)])
    assert part.module.model.norm.weight.dtype == torch.float32


def test_a_tied_head_that_is_stored_must_be_the_embedding(folder: Path) -> None:
    def store(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}

    files = ModelFiles(edit_tensors(folder, store))
    files.load(make_cut(5, (2,)).segments)
    assert "lm_head.weight" not in files.index.reads

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors["lm_head.weight"][-1, -1] += 1
        return tensors

    files = ModelFiles(edit_tensors(folder, change))
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings.*different values"):
        files.load(make_cut(5, (2,)).segments)
    files.load([MIDDLE])


def test_head_cost_is_what_the_head_reads_against_a_block_and_its_own_cost(folder: Path) -> None:
    files = ModelFiles(folder)
    block = sum(e.end - e.begin for key, e in files.index.entries.items() if key.startswith("model.layers.0."))
    assert files.head_cost == VOCAB * HIDDEN * 4 / (block + BLOCK_BYTES)


def test_opening_a_model_leaves_its_config_as_it_was(folder: Path) -> None:
    files = ModelFiles(folder)
    before = copy.deepcopy(files.config.to_dict())
    for loader in LOADERS:
        files.load(make_cut(5, (1, 3)).segments, loader)
    assert files.config.to_dict() == before


def test_a_list_of_blocks_is_its_own_whole_slice_and_no_other() -> None:
    blocks = skeleton.Blocks([nn.Linear(1, 1), nn.Linear(1, 1)])
    assert blocks[:2] is blocks and blocks[:3] is blocks
    assert list(blocks[:1]) == [blocks[0]] and list(blocks[1:]) == [blocks[1]] and len(blocks[:0]) == 0
    assert list(blocks[::-1]) == [blocks[1], blocks[0]] and blocks[-1] is blocks[1]
    assert [name for name, _ in blocks.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
