"""``splitlm.train``: what it gives back, and objectives of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import splitlm
from splitlm.core.errors import UsageError
from splitlm.finetune.objective import Objective, default_objectives

pytestmark = pytest.mark.usefixtures("forks")
CONFIGS = Path(__file__).resolve().parents[1] / "configs"
SMALL = [
    "server.clients=[1,1]",
    "server.data-distribution.num-sample=16",
    "server.global-round=1",
    "server.validation=False",
]


def weights(run: Any) -> dict[str, torch.Tensor]:
    assert run.output == run.folder / "model"
    return load_file(run.output / "model.safetensors")


def test_a_run_in_this_process_gives_what_processes_give(tmp_path: Path) -> None:
    """The same numbers, told the same way; a mapping does for a file."""
    path = CONFIGS / "demo-ushape.yaml"
    rows: list[str] = []
    here = splitlm.train(
        path,
        objectives=default_objectives(),
        folder=tmp_path / "here",
        changes=SMALL,
        record=lambda kind, _: rows.append(kind),
    )
    mapping = yaml.safe_load(path.read_text())
    mapping["server"] |= {"model-path": str(CONFIGS / "models/tiny-bert"), "data-path": str(CONFIGS / "data/feelings")}
    there = splitlm.train(mapping, folder=tmp_path / "there", changes=SMALL)
    ours, theirs = weights(here), weights(there)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-6)
    assert here.summary.samples == there.summary.samples == 16
    assert here.summary.loss_last == pytest.approx(there.summary.loss_last, abs=1e-5)
    assert here.summary.bytes_by_lane["activation"] == there.summary.bytes_by_lane["activation"] > 0
    assert rows.count("round") == 1 and rows.count("party") == 2 and rows.count("window") >= 2
    assert here.folder == tmp_path / "here" and (here.folder / "metrics.jsonl").is_file()


def test_an_objective_of_ones_own_is_what_is_minimised(tmp_path: Path) -> None:
    seen: list[torch.Size] = []

    def hinge(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append(output.shape)
        return 100.0 + torch.nn.functional.multi_margin_loss(output, labels)

    mine = Objective(needs_mask=True, token_loss=False, shift_labels=False, label_key="label", loss=hinge)
    table = splitlm.register_objective("hinge", mine, families=("bert",))
    run = splitlm.train(CONFIGS / "demo-ushape.yaml", objectives=table, folder=tmp_path / "run", changes=SMALL)
    assert seen == [torch.Size([8, 6])] * 2
    assert run.summary.loss_first is not None and run.summary.loss_first > 100


def test_objectives_of_ones_own_reach_no_other_process(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="functions of this process"):
        splitlm.train(CONFIGS / "demo-ushape.yaml", local=False, objectives=default_objectives(), folder=tmp_path / "x")
    assert not (tmp_path / "x").exists()
