"""Rows from files, folders, the hub's cache and the datasets library."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from splitlm.core.errors import UsageError
from splitlm.finetune.data import Rows, load_rows

EMOTION = [{"text": "i feel fine", "label": 1}, {"text": "i feel low", "label": 0}, {"text": "i am angry", "label": 3}]
MATHS = [{"question": "1 + 1?", "answer": "It is 2.\n#### 2"}, {"question": "2 + 2?", "answer": "#### 4"}]


def lines(path: Path, rows: list[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no datasets library; returns the cache's folder."""
    hub = tmp_path / "hub"
    hub.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("splitlm.finetune.dataset._installed", lambda package: False)
    return hub


def test_a_file_of_labelled_texts(tmp_path: Path) -> None:
    rows = load_rows(str(lines(tmp_path / "x.jsonl", [*EMOTION])), "train")
    assert rows.texts == ("i feel fine", "i feel low", "i am angry")
    assert rows.labels == rows.groups == (1, 0, 3)
    assert rows.num_labels == 4  # class 2 is missing, and has its place
    assert len(rows) == 3 and rows.answers == ()


def test_questions_and_answers(tmp_path: Path) -> None:
    rows = load_rows(str(lines(tmp_path / "x.jsonl", [*MATHS])), "train")
    assert rows.texts == ("1 + 1?", "2 + 2?")
    assert rows.answers == ("It is 2.\n#### 2", "#### 4")
    assert (rows.labels, rows.num_labels, rows.groups) == ((), 0, (0, 0))


def test_plain_text_is_a_row_per_line(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes("\ufeffone\r\n\n  \n two\u2028too\nthree".encode())
    assert load_rows(str(tmp_path / "x.txt"), "train").texts == ("one", " two\u2028too", "three")


def test_csv_with_commas_lines_and_labels(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b'label,text\r\n2,"a, b\r\nand ""c"""\r\n0,d\r\n')
    rows = load_rows(str(tmp_path / "x.csv"), "train")
    assert (rows.texts, rows.labels) == (('a, b\r\nand "c"', "d"), (2, 0))


def test_spaces_around_the_names_of_a_csv_do_not_count_nor_columns_that_nobody_reads(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"text, label ,,,note,note\na, 1,,,x,y\n")
    rows = load_rows(str(tmp_path / "x.csv"), "train")
    assert (rows.texts, rows.labels) == (("a",), (1,))


def test_another_label_key(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", [{"text": "a", "mood": 2, "label": "x"}])
    assert load_rows(str(path), "train", label_key="mood").labels == (2,)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "b", "label": "joy"}, r"line 2: label is 'joy'.*whole number from 0.*Number the classes from 0"),
        ({"text": "b", "label": "1"}, "line 2: label is '1'"),
        ({"text": "b"}, "line 2: label is missing"),
        ({"text": "b", "label": None}, "line 2: label is missing"),
        ({"text": "b", "label": -1}, "line 2: label is -1"),
        ({"text": "b", "label": True}, "line 2: label is True"),
        ({"text": "b", "label": 1.0}, "line 2: label is 1.0"),
        ({"text": "b", "label": 10**9}, "line 2: label is 1000000000"),
        ({"label": 1}, "line 2: text is missing"),
        ({"text": " ", "label": 1}, "line 2: text is ' '"),
        ({"text": 5, "label": 1}, "line 2: text is 5"),
        ([1], "line 2: a row is a list"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_row_that_is_not_as_it_should_be(tmp_path: Path, row: object, says: str, first: bool) -> None:
    good = {"text": "a", "label": 0}
    path = lines(tmp_path / "x.jsonl", [row, good] if first else [good, row])
    with pytest.raises(UsageError, match="x.jsonl, " + (says.replace("line 2", "line 1") if first else says)):
        load_rows(str(path), "train")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.jsonl", b'{"text": "a"}\n{"text": ', "line 2: not JSON"),
        ("x.jsonl", b"[" * 100_000, "line 1: not JSON"),
        ("x.jsonl", b"\n\n", "no row in it"),
        ("x.jsonl", b'{"words": "a"}', "rows with the keys words"),
        ("x.jsonl", b"{}", r"rows with the keys \(none\)"),
        ("x.jsonl", b'{"question": "a", "answer": 3}', "line 1: answer is 3"),
        ("x.jsonl", b'{"text": "\xff"}', "byte 10 is not UTF-8"),
        ("x.csv", b"text,label\na,joy\n", "line 2: label is 'joy'"),
        ("x.csv", b"text,label\na\n", "line 2: label is missing"),
        ("x.csv", b"text,label\n,1\n", "line 2: text is ''"),
        ("x.csv", b'text,label\n"a"b,1\n', "not CSV"),
        ("x.csv", b"text,label\na,1,2\n", "line 2: more fields than the header"),
        ("x.csv", b"text,label, label\na,1,0\n", "line 1: the header has 'label' twice"),
        ("x.csv", b"text,text\na,b\n", "line 1: the header has 'text' twice"),
        ("x.csv", b'text, "label"\na,1\n', "line 1: the header has '\"label\"' after a space"),
        ("x.jsonl", b'{"text": "a"}\n{"text": "a", "text": "b"}', "line 2: the key 'text' stands twice"),
        ("x.jsonl", b'{"text": "a", "label": 1, "label": 1}', "line 1: the key 'label' stands twice"),
        ("x.txt", b"\n \n", "no row in it"),
        ("x.bin", b"abc", "ending in '.bin'"),
        ("x.parquet", b"PAR1", "parquet"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=says):
        load_rows(str(tmp_path / name), "train")


def test_a_folder_has_a_file_for_each_split(tmp_path: Path) -> None:
    lines(tmp_path / "emotion_train.jsonl", [*EMOTION])
    lines(tmp_path / "validation.jsonl", EMOTION[:1])
    lines(tmp_path / "gsm8k_test.jsonl", [*MATHS])
    assert len(load_rows("EMOTION", "train", tmp_path)) == 3
    assert len(load_rows("dair-ai/emotion", "validation", tmp_path)) == 1
    assert load_rows("gsm8k", "validation", tmp_path).answers, "GSM8K has no validation split: its test split is taken"
    with pytest.raises(UsageError, match=r"no split 'test' in this folder.*emotion_test or test"):
        load_rows("Emotion", "test", tmp_path)


def test_another_split_is_beside_a_file(tmp_path: Path) -> None:
    path = lines(tmp_path / "my-train.jsonl", [*EMOTION])
    with pytest.raises(UsageError, match=r"no 'validation' split, and my-validation\.jsonl is not beside it"):
        load_rows(str(path), "validation")
    beside = lines(tmp_path / "my-validation.jsonl", EMOTION[:1])
    assert len(load_rows(str(path), "validation")) == len(load_rows(str(beside), "validation")) == 1
    assert len(load_rows("EMOTION", "train", path)) == 3


def test_training_rows_are_never_taken_for_others(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", [*EMOTION])
    assert len(load_rows(str(path), "train")) == 3
    with pytest.raises(UsageError, match="Training rows are not taken for validation"):
        load_rows(str(path), "test")
    contest = lines(tmp_path / "contest.jsonl", [*EMOTION])
    with pytest.raises(UsageError, match="no 'test' split"):
        load_rows(str(contest), "test")


def test_a_base_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file or folder"):
        load_rows("EMOTION", "train", tmp_path / "none")


@pytest.mark.parametrize("name", ["EMOTION", "GSM8K", "someone/something", "nothing", "no/file.jsonl", "x" * 5000])
def test_no_hub_and_no_path(no_hub: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"no hub and no path: .*server\.data-path"):
        load_rows(name, "train")


def test_the_hubs_cache_is_read_without_network_and_without_datasets(no_hub: Path) -> None:
    for repository, file, rows in (
        ("dair-ai--emotion", "split/train.jsonl", EMOTION),
        ("openai--gsm8k", "main/test-00000-of-00001.jsonl", MATHS),
        ("me--mine", "data/train.jsonl", EMOTION),
        ("dair-ai--emotion", "data/validation.jsonl", EMOTION[:2]),
    ):
        place = no_hub / f"datasets--{repository}"
        (place / "refs").mkdir(parents=True, exist_ok=True)
        (place / "refs" / "main").write_text("a" * 40)
        lines(place / "snapshots" / ("a" * 40) / file, [*rows])
    assert load_rows("EMOTION", "train").num_labels == 4
    assert load_rows("GSM8K", "validation").answers[1] == "#### 4"
    assert load_rows("me/mine", "train").labels == (1, 0, 3)
    assert load_rows("EMOTION", "validation").labels == (1, 0)  # an older layout of that repository
    with pytest.raises(UsageError, match="no hub and no path"):
        load_rows("EMOTION", "test")


def test_the_cache_is_looked_at_without_asking_the_hub(no_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[dict[str, object]] = []
    real = huggingface_hub.snapshot_download
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: (asked.append(k), real(*a, **k))[1])
    with pytest.raises(UsageError, match="no hub and no path"):
        load_rows("EMOTION", "train")
    assert asked == [{"repo_type": "dataset", "local_files_only": True}]


LIBRARY = """
from . import exceptions

def load_dataset(path, name=None, *, split):
    if path == "dair-ai/emotion" and split == "train":
        return [{"text": f"{name} {i}", "label": i} for i in range(3)]
    raise {"test": ConnectionError("offline"), "half": exceptions.DatasetsError("cut")}.get(split, ValueError("split"))
"""


def test_the_datasets_library_is_asked_last(no_hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in, so that the test is the same whether the library is installed or not."""
    package = tmp_path / "site" / "datasets"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(LIBRARY)
    (package / "exceptions.py").write_text("class DatasetsError(Exception): pass")
    monkeypatch.setattr("splitlm.finetune.dataset._installed", lambda name: name == "datasets")
    monkeypatch.syspath_prepend(tmp_path / "site")
    held = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "datasets"}
    importlib.invalidate_caches()
    try:
        rows = load_rows("EMOTION", "train")
        assert (rows.source, rows.texts, rows.labels) == (
            "dair-ai/emotion",
            ("split 0", "split 1", "split 2"),
            (0, 1, 2),
        )
        with pytest.raises(UsageError, match=r"no hub and no path: the datasets library cannot give 'test'.*offline"):
            load_rows("EMOTION", "test")
        for split in ("half", "other"):
            with pytest.raises(UsageError, match=f"name: the datasets library cannot give '{split}'"):
                load_rows("EMOTION", split)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "datasets"]:
            del sys.modules[name]
        sys.modules.update(held)


def test_a_folder_of_that_name_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from splitlm.finetune.dataset import _installed

    (tmp_path / "somefolder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert _installed("json") and not _installed("somefolder") and not _installed("nosuchpackage")


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.table({"text": ["a", "b"], "label": [1, 0]}), tmp_path / "train-00000-of-00001.parquet")
    assert load_rows(str(tmp_path), "train").labels == (1, 0)


def test_the_real_files(shared: Path) -> None:
    folder = shared / "data"
    rows = load_rows("EMOTION", "train", folder)
    assert (len(rows), rows.num_labels) == (16000, 6)
    assert Counter(rows.labels) == {1: 5362, 0: 4666, 3: 2159, 4: 1937, 2: 1304, 5: 572}
    assert [len(load_rows("EMOTION", split, folder)) for split in ("validation", "test")] == [2000, 2000]
    maths = load_rows("GSM8K", "test", folder)
    assert len(maths) == len(maths.answers) == 1319 and all("#### " in answer for answer in maths.answers)
    assert len(load_rows(str(folder / "tinyshakespeare.txt"), "train")) > 30000


def test_rows_may_be_none_at_all() -> None:
    assert (len(Rows("x", ())), Rows("x", ()).num_labels, Rows("x", ()).groups) == (0, 0, ())
