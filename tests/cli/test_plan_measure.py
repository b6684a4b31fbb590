"""Measuring, merging and planning as the command line will do it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from splitlm.cli import plan_measure as pm
from splitlm.cli.console import Console
from splitlm.cli.options import CutOptions
from splitlm.core.errors import CutError, UsageError
from splitlm.core.profile import DeviceProfile, LinkProfile, Profiles, decode
from splitlm.model.load import ModelFiles
from splitlm.model.profile import model_profile
from tests.tiny import BLOCKS


@pytest.fixture
def model(tiny: Callable[[str], Path]) -> str:
    return str(tiny("llama"))


def document(model: str, **times: float) -> Profiles:
    """Devices with these block times, without a measurement."""
    profile = model_profile(ModelFiles(Path(model)), "m", "exact")
    devices = (
        DeviceProfile(name=name, measured=profile.identity, memory_bytes=10**9, block_ms=ms)
        for name, ms in times.items()
    )
    return Profiles(model=profile, devices=tuple(devices))


def cli(model: str, options: pm.MeasureOptions, cut: CutOptions | None = None, *, as_json: bool = False) -> bool:
    return pm.by_times(Console(), model, cut or CutOptions(), options, as_json=as_json)


def test_a_machine_is_measured_merged_and_planned_with(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("head", "second"):
        assert cli(model, pm.MeasureOptions(measure=True, device=name, memory=64, out=tmp_path / f"{name}.json"))
    both = tmp_path / "profiles.json"
    assert cli(model, pm.MeasureOptions(merge=[tmp_path / "head.json", tmp_path / "second.json"], out=both))
    found = decode(both.read_bytes())
    assert [d.name for d in found.devices] == ["head", "second"]
    assert all(d.memory_bytes == 64 * 2**20 and d.block_ms > 0 for d in found.devices)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["head.json", "profiles.json", "second.json"]
    capsys.readouterr()
    assert cli(model, pm.MeasureOptions(plan_from=both, sessions=4))
    said = capsys.readouterr()
    assert "head" in said.out and "second" in said.out and "4 sessions in balance" in said.out
    assert "assumed to take 0.3 ms and carry 117 MB/s: head→second, second→head" in said.err


def test_the_plan_is_the_best_for_the_times(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.json"
    pm.write(file, document(model, a=3.0, b=1.0))
    assert cli(model, pm.MeasureOptions(plan_from=file, sessions=4), as_json=True)
    data = json.loads(capsys.readouterr().out)
    assert data["cuts"] == [1]
    assert data["compute_ms"] == [3.0, 4.0]
    assert data["objective"] == "bottleneck"
    assert data["tokens_per_s"] == pytest.approx(250)
    assert data["devices"] == ["a", "b"]


def test_only_the_first_devices_are_used_where_stages_say_so(model: str) -> None:
    three = document(model, a=1.0, b=1.0, c=1.0)
    made = pm.planned(three, pm.MeasureOptions(), stages=2)
    assert [d.name for d in made.ring.devices] == ["a", "b"]
    assert len(pm.planned(three, pm.MeasureOptions()).ring.devices) == 3
    for stages in (0, 4):
        with pytest.raises(UsageError, match="--stages"):
            pm.planned(three, pm.MeasureOptions(), stages=stages)


def test_a_private_plan_keeps_the_tail(model: str) -> None:
    made = pm.planned(document(model, a=1.0, b=1.0), pm.TimesOptions(), sessions=2, private=True, tail_blocks=1)
    assert made.cut.private
    assert made.cuts == made.cut.boundaries[:1]
    assert made.cut.boundaries[1] == BLOCKS - 1


def test_measured_links_are_used_and_only_missing_ones_assumed(model: str) -> None:
    plain = document(model, a=1.0, b=1.0)
    far = LinkProfile(source="a", target="b", latency_ms=9.0, bytes_per_s=1e9)
    made = pm.planned(msgspec.structs.replace(plain, links=(far,)), pm.MeasureOptions(link_ms=1.0))
    assert made.assumed == ()
    assert made.prediction.hop_ms == pytest.approx((9, 9), abs=0.01)
    assert pm.planned(plain, pm.MeasureOptions(link_ms=1.0)).prediction.hop_ms == pytest.approx((1, 1), abs=0.01)
    assert pm.planned(document(model, a=1.0), pm.MeasureOptions()).assumed == ()


def test_too_little_memory_is_said(model: str) -> None:
    small = document(model, a=1.0)
    small = msgspec.structs.replace(small, devices=(msgspec.structs.replace(small.devices[0], memory_bytes=10),))
    with pytest.raises(CutError, match="MiB"):
        pm.planned(small, pm.MeasureOptions())


def test_times_of_another_model_or_type_are_refused(model: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    pm.write(file, document(model, a=1.0))
    other = str(tiny("qwen3"))
    for who, cut, key in ((other, CutOptions(), "config_hash"), (model, CutOptions(dtype="bfloat16"), "dtype")):
        with pytest.raises(UsageError) as failed:
            cli(who, pm.MeasureOptions(plan_from=file), cut)
        assert failed.value.where == f"{file}:model.identity.{key}"


@pytest.mark.parametrize(
    ("options", "cut", "says"),
    [
        (pm.MeasureOptions(out=Path("x")), CutOptions(), "--measure or --merge"),
        (pm.MeasureOptions(measure=True, plan_from=Path("x")), CutOptions(), "one at a time"),
        (pm.MeasureOptions(plan_from=Path("x")), CutOptions(cuts="1"), "one of --cuts and --plan-from"),
        (pm.MeasureOptions(plan_from=Path("no/such/file")), CutOptions(), "no/such/file"),
        (pm.MeasureOptions(merge=[Path("no/such/file")]), CutOptions(), "no/such/file"),
        (pm.MeasureOptions(measure=True, memory=-1), CutOptions(), "--memory"),
    ],
)
def test_senseless_options_are_refused(model: str, options: pm.MeasureOptions, cut: CutOptions, says: str) -> None:
    with pytest.raises(UsageError) as failed:
        cli(model, options, cut)
    assert says in str(failed.value)


def test_options_out_of_range_are_named(model: str) -> None:
    for options, sessions, name in (
        (pm.TimesOptions(), 0, "--sessions"),
        (pm.TimesOptions(context_tokens=-1), 1, "--context"),
    ):
        with pytest.raises(UsageError, match=name):
            pm.planned(document(model, a=1.0), options, sessions=sessions)


def test_nothing_asked_for_is_left_to_the_plain_plan(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not cli(model, pm.MeasureOptions())
    assert capsys.readouterr().out == ""


def test_a_folder_that_takes_no_file_is_named_and_nothing_is_left(model: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--out"):
        pm.write(tmp_path / "no" / "p.json", document(model, a=1.0))
    (tmp_path / "p.json").mkdir()
    with pytest.raises(UsageError, match="--out"):
        pm.write(tmp_path / "p.json", document(model, a=1.0))
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]
