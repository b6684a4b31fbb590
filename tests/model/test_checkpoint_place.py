"""Only a model or an adapter is replaced: a folder with anything else in it is left as it is, to the last file."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from splitlm.core.errors import ModelError, UsageError
from splitlm.model.checkpoint import check_place, new_folder, unwritable

MODEL = ("config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
SHARDS = ("config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "vocab.txt", "merges.txt")
OLD = ("config.json", "pytorch_model.bin", "special_tokens_map.json", "chat_template.jinja", "spiece.model")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "README.md")
BESIDE = (*ADAPTER, *(f"base/{name}" for name in MODEL))


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def held(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in files}


@pytest.mark.parametrize("names", [(), MODEL, SHARDS, OLD, ADAPTER, BESIDE])
def test_a_model_or_an_adapter_is_replaced(names: tuple[str, ...], tmp_path: Path) -> None:
    out = fill(tmp_path / "out", *names)
    out.mkdir(exist_ok=True)
    with new_folder(out) as folder:
        fill(folder, "config.json")
    assert held(tmp_path) == {"out/config.json": "config.json"}


@pytest.mark.parametrize(
    ("names", "first"),
    [
        (("config.json", "src/main.py", "thesis.txt"), "src"),
        (("config.json", "thesis.txt"), "thesis.txt"),
        (("chapter.txt",), "chapter.txt"),
        ((*MODEL, "notes.md"), "notes.md"),
        ((*MODEL, "my.safetensors"), "my.safetensors"),
        ((*MODEL, "README.md/x"), "README.md"),
        ((*MODEL, "base/config.json", "base/model.safetensors"), "base"),
        ((*ADAPTER, "checkpoint-10/adapter_config.json"), "checkpoint-10"),
        ((*BESIDE, "base/thesis.txt"), "base/thesis.txt"),
        ((*ADAPTER, "base/config.json"), "base"),
        ((".git/config", *MODEL), ".git"),
        (("config.json",), "config.json"),
        (("tokenizer.json", "vocab.txt"), "tokenizer.json"),
        (("model.safetensors",), "model.safetensors"),
    ],
)
def test_a_folder_of_something_else_is_left_alone(names: tuple[str, ...], first: str, tmp_path: Path) -> None:
    out = fill(tmp_path / "out", *names)
    with pytest.raises(UsageError) as caught, new_folder(out):
        raise AssertionError("nothing is to be filled")
    text = str(caught.value)
    assert first.rpartition("/")[2] in text and text.startswith(str(out)) and "\n" not in text
    assert "Choose another folder, or remove it" in text
    assert held(out) == {name: name for name in names} and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_is_left_alone(tmp_path: Path) -> None:
    for name in ("thesis", "config.json"):
        fill(tmp_path, name)
        with pytest.raises(UsageError, match=name), new_folder(tmp_path / name):
            pass
        assert (tmp_path / name).read_text() == name


def test_what_comes_while_the_new_one_is_written_is_not_lost(tmp_path: Path) -> None:
    out = fill(tmp_path / "out", *MODEL)
    with pytest.raises(UsageError, match=r"notes\.txt"), new_folder(out) as folder:
        fill(folder, "config.json")
        fill(out, "notes.txt")
    assert held(out) == {name: name for name in (*MODEL, "notes.txt")}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_where_nothing_lies_anything_may_be(tmp_path: Path) -> None:
    check_place(tmp_path / "none")


def test_a_full_disk_is_a_files_fault_and_not_a_checks_answer() -> None:
    error = unwritable(Path("out"), OSError(errno.ENOSPC, "No space left on device"))
    assert isinstance(error, ModelError) and error.exit_code == 4
    assert "No space left on device" in str(error) and "Free space" in str(error)
