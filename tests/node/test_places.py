"""Where model and rows lie is each machine's own affair, whatever the coordinator's file names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from splitlm.core import training
from splitlm.core.config import RunConfig, here, read, resolved
from splitlm.finetune.recipe import read_rows
from splitlm.model.runner import Runner
from splitlm.node.party import PartySettings, _Party
from tests.node.test_tuning import config, model_folder, rows_file
from tests.tiny_tune import CLASSES


def settings(**server: Any) -> RunConfig:
    return read({"server": server})


def test_a_path_among_the_names_is_this_machines() -> None:
    run = settings(
        **{"model-name": "/theirs/model", "data-name": "/theirs/rows", "model": {"/theirs/model": {"n_block": 3}}}
    )
    mine = settings(**{"model-name": "/mine/model", "data-name": "rows.jsonl"})
    got = here(run, mine)
    assert (got.server.model_name, got.server.data_name, got.n_block) == ("/mine/model", "rows.jsonl", 3)
    plain = here(run, settings())
    assert (plain.server.model_name, plain.server.data_name, plain.n_block) == ("Bert", "EMOTION", 3)


@pytest.mark.parametrize("blocks", [None, 2])
def test_a_name_that_is_no_path_is_the_runs_unless_this_machine_has_a_path(blocks: int | None) -> None:
    run = settings(**{"model-name": "gpt2", "data-name": "GSM8K", "model": {"GPT2": {"n_block": blocks}}})
    other = {"model": {"Bert": {"n_block": 7}, "./gpt": {"n_block": 7}}}
    got = here(run, settings(**{"model-name": "Bert", "model-path": "/mine/m", "data-path": "/mine/d"}, **other))
    assert (got.server.model_name, got.server.data_name, got.n_block) == ("gpt2", "GSM8K", blocks)
    assert (got.server.model_path, got.server.data_path) == ("/mine/m", "/mine/d")
    got = here(run, settings(**{"model-name": "./gpt", "data-name": "~/maths"}, **other))
    assert (got.server.model_name, got.server.data_name, got.n_block) == ("./gpt", "~/maths", blocks)


def test_an_owner_validates_on_rows_of_its_own_place(tmp_path: Path) -> None:
    """The coordinator's name of the data is another, and known nowhere."""
    model = model_folder("bert", tmp_path / "model", 0.0)
    rows = rows_file(tmp_path, "classify")
    (tmp_path / "validation.jsonl").write_text("".join(rows.read_text().splitlines(keepends=True)[:5]))
    mine = config(model, rows, server={"validation": True, "data-path": None, "data-name": str(tmp_path)})
    theirs = config(model, rows, server={"validation": True, "data-path": None, "data-name": "nobody/knows"})
    runner = Runner()
    party = _Party(PartySettings("owner", mine, lambda name, _: Path(name)), None, runner)  # type: ignore[arg-type]
    start = training.Start(0, 1, 1, "r", resolved(theirs), classes=CLASSES)
    recipe, data = party._open(start, read_rows(mine, "train"))
    runner.close(1.0)
    assert recipe.files.folder == model and data is not None
    assert sum(batch.samples for batch in data.validation()) == 5
