"""A run's folder: what was stored comes back, whole rounds only, and a disk that fails or files that rot do no harm."""

from __future__ import annotations

import csv
import errno
import json
import logging
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from splitlm.core.cut import Segment
from splitlm.core.errors import CheckpointError, SplitlmError, UsageError
from splitlm.finetune.partyfile import PartyFolder, flatten, nest
from splitlm.finetune.store import Identity, Party, RunFolder

CUT = (Segment(0, 1, embed=True), Segment(1, 3), Segment(3, 4, head=True))
WHO = Identity("a" * 64, CUT)


def party(seed: int, numbers: int = 6) -> Party:
    """A party whose optimizer has really stepped."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(2, numbers // 2, generator=generator))
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    (weight * torch.randn(weight.shape, generator=generator)).sum().backward()
    optimizer.step()
    return Party(
        tensors={"h.0.weight": weight.detach(), "half": torch.randn(3, generator=generator).bfloat16()},
        optimizer=optimizer.state_dict(),
        rng=generator.get_state().numpy().tobytes(),
        cursor={"epoch": seed, "row": 7},
        extra={"samples": 12, "name": "north"},
    )


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


def same(one: Party, other: Party) -> bool:
    return (
        {k: v.tolist() for k, v in one.tensors.items()} == {k: v.tolist() for k, v in other.tensors.items()}
        and all(one.tensors[key].dtype == other.tensors[key].dtype for key in one.tensors)
        and equal(one.optimizer, other.optimizer)
        and (one.rng, one.cursor, one.extra) == (other.rng, other.cursor, other.extra)
    )


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder(tmp_path / "run", WHO) as folder:
        folder.create({"name": "x", "server": {"global-round": 2}}, {"torch": "2"})
        yield folder


def rounds(run: RunFolder) -> list[str]:
    return sorted(path.name for path in (run.path / "rounds").iterdir())


def temporary(run: RunFolder) -> list[Path]:
    return [path for path in run.path.rglob("*") if ".part" in path.name]


def test_what_was_stored_comes_back(run: RunFolder) -> None:
    parties = {"north": party(1), "worker 2/b": party(2), "manifest": Party({}), "..": Party({})}
    run.save_round(1, parties)
    again = RunFolder(run.path, WHO)  # to read, a folder need not be taken
    assert again.latest() == 1
    for name, stored in parties.items():
        assert same(again.load(1, name), stored)
    assert temporary(run) == [] and all(path.parent.name == "000001" for path in run.path.rglob("party-*"))


def test_a_loaded_optimizer_goes_on_as_if_nothing_had_been(run: RunFolder) -> None:
    run.save_round(1, {"a": party(1)})
    results = []
    for stored in (party(1), run.load(1, "a")):
        weight = torch.nn.Parameter(stored.tensors["h.0.weight"].clone())
        optimizer = torch.optim.AdamW([weight], lr=0.5)
        optimizer.load_state_dict(stored.optimizer)  # type: ignore[arg-type]
        generator = torch.Generator()
        generator.set_state(torch.frombuffer(bytearray(stored.rng), dtype=torch.uint8))
        (weight * torch.randn(weight.shape, generator=generator)).sum().backward()
        optimizer.step()
        results.append(weight.detach())
    assert torch.equal(*results)


def test_loaded_tensors_are_aligned_and_no_longer_need_the_file(run: RunFolder) -> None:
    run.save_round(1, {"a": party(1)})
    loaded = run.load(1, "a")
    for path in (run.path / "rounds").rglob("*.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))
    assert same(loaded, party(1))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in loaded.tensors.values())


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(0, 9) | st.just("$tensor"), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_any_nested_value_comes_back(value: object) -> None:
    tensors: dict[str, torch.Tensor] = {}
    flat = json.loads(json.dumps(flatten(value, tensors), allow_nan=False))
    assert equal(nest(flat, tensors), value)


def test_tensors_in_nested_values_do_not_meet_under_one_name() -> None:
    value = {
        "a.b": {"c": torch.tensor(1)},
        "a": {"b.c": torch.tensor(2)},
        1: [torch.tensor(3)],
        "1": (torch.tensor(4),),
    }
    tensors: dict[str, torch.Tensor] = {}
    assert equal(nest(flatten(value, tensors), tensors), value) and len(tensors) == 4


def test_what_is_neither_plain_nor_a_tensor_is_refused(run: RunFolder) -> None:
    with pytest.raises(TypeError, match=r"state\.0:x is a set"):
        run.save_round(1, {"a": Party({}, optimizer={"x": {1}})})
    assert run.latest() is None and rounds(run) == []


def test_the_settings_are_written_once(run: RunFolder) -> None:
    assert yaml.safe_load((run.path / "config.yaml").read_text()) == {"name": "x", "server": {"global-round": 2}}
    assert json.loads((run.path / "versions.json").read_text()) == {"torch": "2"}
    run.close()
    with pytest.raises(UsageError, match="Another run lies here"):
        RunFolder(run.path, WHO).create({}, {})
    with RunFolder(run.path, WHO) as again:
        assert again.reopen() == {"name": "x", "server": {"global-round": 2}}
        again.save_round(1, {"a": party(1)})
    with pytest.raises(RuntimeError, match="not open"):
        again.save_round(2, {"a": party(1)})
    with pytest.raises(RuntimeError, match="not open"):
        again.metrics({"x": 1})
    with pytest.raises(UsageError, match="no run here"):
        RunFolder(run.path.parent / "other", WHO).reopen()


def test_a_folder_in_use_is_refused_also_to_another_process(run: RunFolder) -> None:
    for take in (lambda other: other.reopen(), lambda other: other.create({}, {})):
        with pytest.raises(UsageError, match="Another process writes here"):
            take(RunFolder(run.path, WHO))
    code = (
        "import sys; from pathlib import Path; from splitlm.core.errors import UsageError\n"
        "from splitlm.finetune.store import *\n"
        "try: RunFolder(Path(sys.argv[1]), Identity('a', ())).reopen()\n"
        "except UsageError as error: print(error)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, str(run.path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert "Another process writes here" in said.stdout


def test_two_rounds_are_kept(run: RunFolder) -> None:
    for number in (1, 2, 3, 10):
        run.save_round(number, {"a": party(number)})
    assert rounds(run) == ["000003", "000010"] and run.latest() == 10
    assert same(run.load(3, "a"), party(3))
    run.save_round(10, {"a": party(5), "b": party(6)})
    assert same(run.load(10, "a"), party(5)) and same(run.load(3, "a"), party(3))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("file", "damage", "says"),
    [
        ("party-a.safetensors", flip, "SHA-256"),
        ("party-b.json", flip, "SHA-256"),
        ("party-b.safetensors", lambda path: os.truncate(path, 9), "has 9 bytes"),
        ("party-a.json", Path.unlink, "cannot be read"),
        ("manifest.json", lambda path: os.truncate(path, 40), "manifest cannot be read"),
    ],
)
def test_a_damaged_round_is_passed_over(
    run: RunFolder, file: str, damage: Callable[[Path], None], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        run.save_round(number, {"a": party(number), "b": party(number + 2)})
    damage(run.path / "rounds" / "000002" / file)
    with caplog.at_level(logging.WARNING):
        assert run.latest() == 1
    assert file in caplog.text and says in caplog.text and "Round 2" in caplog.text
    with pytest.raises(CheckpointError, match=says):
        run.load(2, file.removeprefix("party-")[0].replace("m", "a"))
    caplog.clear()
    damage(run.path / "rounds" / "000001" / file)
    with pytest.raises(CheckpointError) as caught:
        run.latest()
    assert "Round 1" in caplog.text and all(f"rounds/00000{n}/{file} (" in str(caught.value) for n in (1, 2))
    run.save_round(2, {"a": party(9)})  # the round is done again
    assert run.latest() == 2


def test_a_round_without_its_manifest_is_not_there(run: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    """A crash before the last step; no reason to warn."""
    run.save_round(1, {"a": party(1)})
    shutil.copytree(run.path / "rounds" / "000001", run.path / "rounds" / "000002")
    (run.path / "rounds" / "000002" / "manifest.json").unlink()
    assert run.latest() == 1 and caplog.text == ""
    with pytest.raises(CheckpointError, match="manifest cannot be read"):
        run.load(2, "a")


@pytest.mark.parametrize("other", [Identity("b" * 64, CUT), Identity("a" * 64, (Segment(0, 4, True, True),))])
def test_a_round_of_another_model_or_cut_is_refused(run: RunFolder, other: Identity) -> None:
    run.save_round(1, {"a": party(1)})
    there = RunFolder(run.path, other)
    for ask in (there.latest, lambda: there.load(1, "a")):
        with pytest.raises(CheckpointError) as caught:
            ask()
        assert str(WHO) in str(caught.value) and str(other) in str(caught.value)
    assert str(WHO) != str(other)
    with pytest.raises(UsageError, match=r"'z'.*one of a"):
        run.load(1, "z")


def test_the_manifest_names_every_file(run: RunFolder) -> None:
    import hashlib

    run.save_round(1, {"a": party(1), "b": party(2)})
    folder = run.path / "rounds" / "000001"
    said = json.loads((folder / "manifest.json").read_text())
    others = [path for path in folder.iterdir() if path.name != "manifest.json"]
    assert said["files"] == {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in others
    }
    assert len(others) == 4 and said["identity"]["model"] == WHO.model and len(said["identity"]["cut"]) == 3


def test_a_failure_at_any_write_leaves_the_round_before(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rename of a round fails once; what a reader finds is round 1, and nothing else is left."""
    run.save_round(1, {"a": party(1)})
    replace, steps = Path.replace, 0
    for failing in range(9):
        left = [failing]

        def broken(self: Path, target: Path, left: list[int] = left) -> Path:
            assert RunFolder(run.path, WHO).latest() == 1  # at every step
            if left[0] == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            left[0] -= 1
            return replace(self, target)

        monkeypatch.setattr(Path, "replace", broken)
        try:
            run.save_round(2, {"a": party(2), "b": party(3)})
        except SplitlmError as error:
            steps += 1
            assert "No space left on device" in str(error) and "\n" not in str(error) and str(run.path) in str(error)
            assert run.latest() == 1 and rounds(run) == ["000001"] and temporary(run) == []
            assert same(run.load(1, "a"), party(1))
        else:
            break
    assert steps == 5  # two files of each party, and the manifest
    assert run.latest() == 2


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """A real one of a megabyte, where this may be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        with RunFolder(disk / "run", WHO) as run:
            run.create({}, {})
            run.save_round(1, {"a": party(1)})
            with pytest.raises(SplitlmError, match="No space left on device"):
                run.save_round(2, {"a": party(1), "b": party(2, numbers=200_000)})
            assert run.latest() == 1 and rounds(run) == ["000001"] and temporary(run) == []
            run.metrics({"loss": 1.0})
            room = shutil.disk_usage(disk).free
            (disk / "ballast").write_bytes(bytes(room))
            before = (run.path / "metrics.jsonl").read_bytes()
            with pytest.raises(SplitlmError, match="No space left on device"):
                run.metrics({"loss": "x" * 50_000})
            assert (run.path / "metrics.jsonl").read_bytes() == before
            (disk / "ballast").unlink()
            run.save_round(2, {"a": party(2)})
            assert run.latest() == 2
    finally:
        subprocess.run(["umount", disk], check=True)


def test_metrics_are_lines(run: RunFolder) -> None:
    run.metrics({"round": 1, "loss": 0.5, "who": 'north, "upper"'})
    run.metrics({"round": 2, "loss": math.nan, "who": None})
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"round": 1, "loss": 0.5, "who": 'north, "upper"'},
        {"round": 2, "loss": None, "who": None},
    ]
    with (run.path / "metrics.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["round", "loss", "who"],
            ["1", "0.5", 'north, "upper"'],
            ["2", "", ""],
        ]


def test_new_columns_widen_the_table(run: RunFolder) -> None:
    run.metrics({"round": 1, "loss": 0.5})
    run.close()
    with RunFolder(run.path, WHO) as again:
        again.reopen()
        again.metrics({"loss": 0.25, "accuracy": [1, 2]})
        again.metrics({"round": 3})
    with (run.path / "metrics.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["round", "loss", "accuracy"],
            ["1", "0.5", ""],
            ["", "0.25", "[1, 2]"],
            ["3", "", ""],
        ]


def test_a_line_that_a_crash_left_half_does_not_spoil_the_next(run: RunFolder) -> None:
    (run.path / "metrics.jsonl").write_bytes(b'{"round": 1')
    run.metrics({"round": 2})
    assert (run.path / "metrics.jsonl").read_text().splitlines() == ['{"round": 1', '{"round":2}']


def test_a_folder_that_cannot_be_begun_can_be_begun_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = RunFolder(tmp_path / "run", WHO)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", broken)
        with pytest.raises(SplitlmError, match="No space left on device"):
            run.create({}, {})
    assert [path.name for path in run.path.iterdir()] == ["lock"]
    with run:
        run.create({}, {})
        assert (run.path / "config.yaml").is_file()


def test_a_party_keeps_its_own_rounds_as_long_as_a_manifest_may_name_them(tmp_path: Path) -> None:
    north, south = PartyFolder(tmp_path, "north"), PartyFolder(tmp_path, "south")
    files = {number: north.save(number, party(number)) for number in range(5)}
    south.save(0, party(9))
    left = {path.parent.name: path.name for path in tmp_path.glob("rounds/*/party-north.json")}
    assert sorted(left) == ["000002", "000003", "000004"]
    assert (tmp_path / "rounds" / "000000" / "party-south.json").exists()  # another's is its own affair
    assert same(north.load(3, files[3]), party(3)) and same(south.load(3, files[3], "north"), party(3))
    for file, damage, says in (
        ("party-north.json", flip, "SHA-256"),
        ("party-north.safetensors", Path.unlink, "cannot be read"),
    ):
        damage(tmp_path / "rounds" / "000004" / file)
        with pytest.raises(CheckpointError, match=says):
            north.load(4, files[4])
    with pytest.raises(CheckpointError, match="no such file"):
        north.load(3, {})


def test_a_party_whose_disk_is_full_leaves_no_half_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PartyFolder(tmp_path, "north")
    files = folder.save(0, party(1))

    def broken(self: Path, target: Path) -> Path:
        if target.suffix == ".json":
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.rename(target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", broken)
        with pytest.raises(SplitlmError, match="No space left on device"):
            folder.save(1, party(2))
    assert list((tmp_path / "rounds" / "000001").iterdir()) == []
    assert same(folder.load(0, files), party(1))


def test_files_that_lie_elsewhere_are_their_partys_to_verify(run: RunFolder, tmp_path: Path) -> None:
    away = PartyFolder(tmp_path / "away", "b")
    here = PartyFolder(run.path, "a").save(1, party(1))
    there = away.save(1, party(2))
    run.complete(1, ["b", "a"], here | there)
    manifest = run.manifest(1)
    assert manifest.parties == ("a", "b") and manifest.elsewhere == ("party-b.json", "party-b.safetensors")
    assert run.latest() == 1 and same(run.load(1, "a"), party(1))
    assert same(away.load(1, manifest.files), party(2))
    flip(run.path / "rounds" / "000001" / "party-a.json")
    with pytest.raises(CheckpointError, match=r"000001/party-a\.json \(Its SHA-256"):
        run.latest()


def test_what_an_earlier_attempt_at_a_round_left_is_gone_with_it(run: RunFolder) -> None:
    run.save_round(0, {"a": party(1)})
    folder = PartyFolder(run.path, "old")
    folder.save(1, party(1))
    (run.path / ".model.x.part").mkdir()
    run.close()
    with RunFolder(run.path, WHO) as again:
        again.reopen()
        assert rounds(again) == ["000000", "000001"]  # who goes on may still find that this cannot be
        again.tidy()
        assert rounds(again) == ["000000"] and not list(run.path.glob("*.part")) and not list(run.path.glob(".*.part"))
        folder.save(1, party(1))
        again.complete(1, ["a"], PartyFolder(run.path, "a").save(1, party(2)))
        assert {path.name for path in (run.path / "rounds" / "000001").iterdir()} == {
            "manifest.json",
            "party-a.json",
            "party-a.safetensors",
        }


def test_every_part_of_an_identity_is_in_its_words() -> None:
    first = Identity("a" * 64, CUT, "b" * 64, 2, 3, 8)
    others = [
        Identity("c" * 64, CUT, "b" * 64, 2, 3, 8),
        Identity("a" * 64, CUT[:2], "b" * 64, 2, 3, 8),
        Identity("a" * 64, CUT, "", 2, 3, 8),
        Identity("a" * 64, CUT, "b" * 64, 1, 3, 8),
        Identity("a" * 64, CUT, "b" * 64, 2, 2, 8),
        Identity("a" * 64, CUT, "b" * 64, 2, 3, 0),
    ]
    assert len({str(one) for one in [first, *others]}) == 7
