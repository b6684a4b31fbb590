"""The example of docs/objectives.md runs, and learns."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import torch

from splitlm.finetune.objective import default_objectives

PAGE = "docs/objectives.md"


def test_the_example_adds_a_model_and_trains_it(root: Path, tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", (root / PAGE).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    example = tmp_path / "example.py"
    example.write_text(code)
    with torch.random.fork_rng(devices=[]):
        names = runpy.run_path(str(example))
    assert names["objective"].name == "bag" and "bag" not in default_objectives().entries
    assert names["means"][-1] < 0.1 * names["means"][0]
    assert all(later < earlier for earlier, later in zip(names["means"][:3], names["means"][1:4], strict=True))


def test_the_table_of_objectives_is_complete(root: Path) -> None:
    page = (root / PAGE).read_text(encoding="utf-8").split("##")[0]
    assert re.findall(r"^\| `([\w-]+)` ", page, re.MULTILINE) == list(default_objectives().entries)
