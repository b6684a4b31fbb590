"""A model directory that is damaged in any way ends in one paragraph that names the file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from splitlm.core.cut import make_cut
from splitlm.core.errors import CheckpointError, ModelError, ModelMissingError, SplitlmError
from splitlm.model.header import MAX_HEADER, read_header
from splitlm.model.index import FINGERPRINT_BYTES, CheckpointIndex, read_json
from splitlm.model.load import ModelFiles
from tests.model.made import edit_config, edit_tensors, header_of, make, put_header
from tests.tiny import COMMON

F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.fixture
def folder(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the tiny Llama, to be damaged."""
    return Path(shutil.copytree(tiny("llama"), tmp_path / "model"))


def shard(folder: Path, extra: dict[str, str] | None = None) -> Path:
    """Two files and an index file instead of one file."""
    tensors = load_file(folder / "model.safetensors")
    keys = sorted(tensors)
    weight_map = {}
    for name, part in (("a.safetensors", keys[::2]), ("b.safetensors", keys[1::2])):
        save_file({key: tensors[key] for key in part}, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors").unlink()
    listing = {"metadata": {}, "weight_map": weight_map | (extra or {})}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listing))
    return folder


def test_reading_gives_the_tensor_in_aligned_memory(folder: Path) -> None:
    index = CheckpointIndex(folder)
    stored = load_file(folder / "model.safetensors")
    for key, tensor in stored.items():
        assert key in index
        for dtype in (None, torch.bfloat16, torch.float16, torch.float32):
            got = index.read(key, dtype)
            assert got.data_ptr() % 64 == 0
            assert torch.equal(got, tensor if dtype is None else tensor.to(dtype))
    assert "nonsense" not in index
    with pytest.raises(CheckpointError, match=r"no tensor 'nonsense'"):
        index.read("nonsense")


def test_an_index_holds_no_weights_and_no_file_stays_open(folder: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    index = CheckpointIndex(folder)
    index.fingerprint()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert not [value for value in vars(index).values() if isinstance(value, torch.Tensor)]
    assert index.reads == []
    assert str(folder) not in Path("/proc/self/maps").read_text()


def test_one_file_or_many_have_one_fingerprint(folder: Path) -> None:
    one = CheckpointIndex(folder)
    whole = {key: one.read(key) for key in one.entries}
    print_of_one, config = one.fingerprint(), one.config_hash()
    many = CheckpointIndex(shard(folder))
    assert many.entries.keys() == one.entries.keys()
    assert (many.fingerprint(), many.config_hash()) == (print_of_one, config)
    assert all(torch.equal(many.read(key), tensor) for key, tensor in whole.items())


@pytest.mark.parametrize("change", ["value", "key", "shape", "type"])
def test_other_weights_have_another_fingerprint(change: str, folder: Path) -> None:
    before = CheckpointIndex(folder).fingerprint()
    key = "model.norm.weight"

    def damage(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if change == "value":
            tensors[key][0] += 1
        elif change == "key":
            tensors["model.norm.other"] = tensors.pop(key)
        elif change == "shape":
            tensors[key] = tensors[key].view(2, -1)
        else:
            tensors[key] = tensors[key].view(torch.int32)
        return tensors

    assert CheckpointIndex(edit_tensors(folder, damage)).fingerprint() != before


def test_a_fingerprint_reads_the_beginning_of_every_tensor_only(folder: Path) -> None:
    before = CheckpointIndex(folder).fingerprint()

    def late(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors["model.embed_tokens.weight"].view(-1)[FINGERPRINT_BYTES // 4] += 1
        return tensors

    assert CheckpointIndex(edit_tensors(folder, late)).fingerprint() == before

    def last(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors["model.embed_tokens.weight"].view(-1)[FINGERPRINT_BYTES // 4 - 1] += 1
        return tensors

    assert CheckpointIndex(edit_tensors(folder, last)).fingerprint() != before


def test_the_config_hash_is_the_models_and_not_the_files(folder: Path) -> None:
    before = CheckpointIndex(folder).config_hash()
    idle = {"transformers_version": "4.0", "_name_or_path": "x", "architectures": ["Y"], "use_cache": False}
    assert CheckpointIndex(edit_config(folder, **idle)).config_hash() == before
    old = {"dtype": ..., "torch_dtype": "float32", "rope_parameters": ..., "rope_theta": 10000.0, "rope_scaling": None}
    assert CheckpointIndex(edit_config(folder, **old)).config_hash() == before
    assert CheckpointIndex(edit_config(folder, attention_bias=...)).config_hash() == before  # the default
    assert CheckpointIndex(edit_config(folder, rope_theta=500000.0)).config_hash() != before
    assert CheckpointIndex(edit_config(folder, rope_theta=10000.0)).config_hash() == before
    assert CheckpointIndex(edit_config(folder, rms_norm_eps=1e-3)).config_hash() != before


def test_equal_content_is_compared_to_the_end(tmp_path: Path) -> None:
    big = torch.zeros(600_000)
    other = big.clone()
    other[-1] = 1
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": big, "b": big.clone(), "c": other, "d": big[:-1].clone()}, tmp_path / "model.safetensors")
    index = CheckpointIndex(tmp_path)
    assert index.same_content("a", "b")
    assert not index.same_content("a", "c")
    assert not index.same_content("a", "d")
    assert index.reads == []


# Files that are not what they should be


def test_files_that_are_not_there(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelMissingError, match=r"config\.json: The file cannot be read"):
        CheckpointIndex(tmp_path / "nowhere")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelMissingError, match=r"no model\.safetensors"):
        CheckpointIndex(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    (shard(folder) / "b.safetensors").unlink()
    with pytest.raises(ModelMissingError, match=r"b\.safetensors.*every file that the index names"):
        CheckpointIndex(folder)


def test_an_index_that_promises_too_much(folder: Path) -> None:
    shard(folder, {"model.more": "a.safetensors"})
    with pytest.raises(CheckpointError, match=r"a\.safetensors: The tensor 'model\.more' is not in it"):
        CheckpointIndex(folder)


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", 3, None, "", "x\0y", "\ud800", "x" * 5000, ".."])
def test_an_index_that_names_no_file(name: Any, folder: Path) -> None:
    shard(folder, {"model.more": name})
    with pytest.raises(ModelError) as caught:
        CheckpointIndex(folder)
    str(caught.value).encode()


@pytest.mark.parametrize("listing", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "[]", "{", "\xff"])
def test_an_index_that_is_no_index(listing: str, folder: Path) -> None:
    (shard(folder) / "model.safetensors.index.json").write_text(listing, "latin-1")
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        CheckpointIndex(folder)


def test_one_tensor_in_two_files(folder: Path) -> None:
    shard(folder)
    tensors = load_file(folder / "b.safetensors")
    save_file({**tensors, "model.embed_tokens.weight": torch.zeros(1)}, folder / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"b\.safetensors.*model\.embed_tokens\.weight.*a\.safetensors too"):
        CheckpointIndex(folder)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100])
def test_a_file_cut_short(size: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, size)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{size} bytes"):
        CheckpointIndex(folder)


def test_one_byte_too_few_or_too_many(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=f"truncated.*Expected {len(whole)} bytes"):
        CheckpointIndex(folder)
    path.write_bytes(whole + b"x")
    with pytest.raises(CheckpointError, match="1 bytes too many"):
        CheckpointIndex(folder)


def test_a_file_that_shrinks_after_it_was_opened(folder: Path) -> None:
    index = CheckpointIndex(folder)
    last = max(index.entries, key=lambda key: index.entries[key].end)
    os.truncate(folder / "model.safetensors", index.entries[last].end - 1)
    with pytest.raises(CheckpointError, match="The file ends at byte"):
        index.read(last)


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\noid", b"<html>" * 9, b"PK\3\4" * 9])
def test_files_of_another_kind(content: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"not safetensors.*Expected a safetensors file"):
        CheckpointIndex(folder)


HEADERS: dict[str, Any] = {
    "list": [],
    "number": 5,
    "entry is a list": {"a": []},
    "no dtype": {"a": {"shape": [1], "data_offsets": [0, 4]}},
    "unknown dtype": {"a": F32 | {"dtype": "F8_E4M3"}},
    "dtype is a list": {"a": F32 | {"dtype": []}},
    "no shape": {"a": {"dtype": "F32", "data_offsets": [0, 4]}},
    "shape of strings": {"a": F32 | {"shape": ["1"]}},
    "shape of floats": {"a": F32 | {"shape": [1.0]}},
    "shape of booleans": {"a": F32 | {"shape": [True]}},
    "negative shape": {"a": F32 | {"shape": [-1, -1]}},
    "endless shape": {"a": F32 | {"shape": [10**300]}},
    "one offset": {"a": F32 | {"data_offsets": [0]}},
    "three offsets": {"a": F32 | {"data_offsets": [0, 2, 4]}},
    "negative offset": {"a": F32 | {"data_offsets": [-4, 0]}},
    "offsets backwards": {"a": F32 | {"data_offsets": [4, 0]}},
    "offsets as a map": {"a": F32 | {"data_offsets": {"0": 4}}},
    "shape and offsets differ": {"a": F32 | {"shape": [2]}},
    "overlap": {"a": F32, "b": F32},
    "partly over": {"a": F32 | {"shape": [2], "data_offsets": [0, 8]}, "b": F32 | {"data_offsets": [4, 8]}},
    "gap": {"a": F32, "b": F32 | {"data_offsets": [8, 12]}},
    "late begin": {"a": F32 | {"data_offsets": [4, 8]}},
    "beyond the file": {"a": F32 | {"shape": [100], "data_offsets": [0, 400]}},
    "no tensor at all but bytes": {},
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_lie(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    put_header(path, json.dumps(HEADERS[name]), bytes(12))
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_header(path)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"\xff\xfe{\x00}\x00",
        '{"a": {}}'.encode("utf-16"),
        b'{"\xff": 1}',
        b'{"\\ud800": ' + json.dumps(F32).encode() + b"}",
        b"[" * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": ' + json.dumps(F32).encode() + b', "a": ' + json.dumps(F32).encode() + b"}",
    ],
    ids=["empty", "open", "utf-16 mark", "utf-16", "latin", "surrogate", "deep", "huge number", "twice"],
)
def test_headers_that_are_no_json(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    put_header(path, header, bytes(4))
    with pytest.raises(CheckpointError, match=r"x\.safetensors: The file's header cannot be read") as caught:
        read_header(path)
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize("length", [MAX_HEADER + 1, 2**63, 2**64 - 1])
def test_an_absurd_header_length_allocates_nothing(length: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + bytes(100))
    with pytest.raises(CheckpointError, match=str(length)):
        read_header(path)


def test_what_the_format_allows_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    header = {"__metadata__": {"a": "b"}, "none": F32 | {"shape": [0, 3], "data_offsets": [4, 4]}, "a": F32}
    header["scalar"] = F32 | {"shape": [], "data_offsets": [4, 8]}
    put_header(path, json.dumps(header) + "   ", bytes(8))
    assert {key: entry.shape for key, entry in read_header(path).items()} == {"none": (0, 3), "a": (1,), "scalar": ()}


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_json_that_is_none(content: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_json(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_json(path)


# Any damage at all


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {**COMMON, "hidden_size": 8, "head_dim": 2, "intermediate_size": 4, "num_hidden_layers": 2}
    return make(tmp_path_factory.mktemp("small"), "gemma2", {**options, "sliding_window": 4})


DAMAGE = st.lists(
    st.tuples(st.sampled_from(["set", "cut", "insert", "delete"]), st.integers(0, 10**6), st.integers(0, 255)),
    min_size=1,
    max_size=4,
)


def damaged(data: bytes, damage: list[tuple[str, int, int]]) -> bytes:
    out = bytearray(data)
    for how, at, byte in damage:
        at %= len(out) or 1
        if how == "set" and out:
            out[at] = byte
        elif how == "insert":
            out.insert(at, byte)
        elif how == "delete" and out:
            del out[at]
        elif how == "cut" and at > len(out) * 3 // 4:
            del out[at:]
    return bytes(out)


def load_all(folder: Path) -> None:
    """What a stage does with a directory; damage may go unseen, but no other library's error may come out."""
    try:
        files = ModelFiles(folder)
        files.index.fingerprint()
        files.index.config_hash()
        _ = files.head_cost
        files.load(make_cut(files.blocks, [1] if files.blocks > 1 else []).segments)
    except SplitlmError as error:
        assert isinstance(error, ModelError)
        assert str(error)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=DAMAGE)
def test_fuzz_config(damage: list[tuple[str, int, int]], small: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    shutil.copy(small / "model.safetensors", folder)
    (folder / "config.json").write_bytes(damaged((small / "config.json").read_bytes(), damage))
    load_all(folder)
    shutil.rmtree(folder)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=DAMAGE, whole=st.booleans())
def test_fuzz_header(
    damage: list[tuple[str, int, int]], whole: bool, small: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    shutil.copy(small / "config.json", folder)
    raw = (small / "model.safetensors").read_bytes()
    if whole:  # the eight bytes of length too
        (folder / "model.safetensors").write_bytes(damaged(raw[:400], damage) + raw[400:])
    else:
        header, body = header_of(small / "model.safetensors")
        put_header(folder / "model.safetensors", damaged(json.dumps(header).encode(), damage), body)
    load_all(folder)
    shutil.rmtree(folder)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**63, 10**30, 1e308, float("nan"), "5", "", "cpu", [], [1], {}, {"a": 1}, [None] * 2]),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fuzz_config_values(data: st.DataObject, small: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any field may hold anything."""
    config = json.loads((small / "config.json").read_text())
    extra = ["head_dim", "quantization_config", "auto_map", "rope_scaling", "rope_theta", "attn_implementation"]
    extra += ["_attn_implementation", "text_config", "num_labels", "id2label", "is_decoder", "torch_dtype"]
    for name in data.draw(st.lists(st.sampled_from([*config, *extra]), min_size=1, max_size=2)):
        config[name] = data.draw(JUNK)
    folder = tmp_path_factory.mktemp("fuzz")
    shutil.copy(small / "model.safetensors", folder)
    (folder / "config.json").write_text(json.dumps(config))
    load_all(folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", [{}, [], 3, "float7", {"a": 1}])
def test_an_element_type_that_is_none(name: str, value: object, small: Path, tmp_path: Path) -> None:
    config = json.loads((small / "config.json").read_text())
    config.pop("dtype", None)
    shutil.copy(small / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, name: value}))
    load_all(tmp_path)
