"""Input that cannot be trained on ends a run with what is wrong and where; a loss that is no number is not retried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from splitlm.bus.memory import MemoryHub
from splitlm.core import training
from splitlm.core.errors import ModelError, SplitlmError, UsageError
from splitlm.finetune.batch import Microbatch
from splitlm.finetune.objective import Objective
from splitlm.finetune.party import Party
from splitlm.finetune.recipe import OwnerData, Recipe, open_recipe, read_rows
from splitlm.model.tuned import TunedPart
from splitlm.model.uncut_train import UncutTrainer
from tests.node import test_tuning
from tests.node.test_tuning import TWO_STAGE, config, model_folder, rows_file, run


def leaves(error: BaseException) -> list[BaseException]:
    return [e for sub in error.exceptions for e in leaves(sub)] if isinstance(error, BaseExceptionGroup) else [error]


def paragraph(error: BaseException) -> str:
    """What the coordinator ended with: it names the party in front."""
    return next(str(e) for e in leaves(error) if "owner 0 (" in str(e) or "worker 0 (" in str(e))


class Heard(MemoryHub):
    """Keeps what the coordinator says."""

    windows: list[training.Window]

    async def send(self, peer: str, message: Any) -> None:
        if isinstance(message, training.Window):
            self.windows.append(message)
        await super().send(peer, message)


@pytest.mark.parametrize("trouble", ["loss", "hidden", "gradient"])
def test_no_number_stops_at_the_last_committed_window(trouble: str, tmp_path: Path, monkeypatch: Any) -> None:
    """In the second microbatch of the second window: the first was stepped, the second is not tried again."""
    folder, data = model_folder("bert", tmp_path / "model", 0.2), rows_file(tmp_path, "classify")
    made = config(folder, data)
    seen: list[Any] = []
    parties: list[Party] = []
    windows: list[training.Window] = []
    value, forward, backward, party = Objective.value, TunedPart.forward, TunedPart.backward, Recipe.party

    def due(part: TunedPart | None, key: Any = None) -> bool:
        """One microbatch after the other: with one in flight, calls count them."""
        seen.append(key)
        return len(seen) == 5

    def spoilt_value(self: Objective, output: torch.Tensor, labels: torch.Tensor) -> Any:
        total, items = value(self, output, labels)
        return (total * torch.inf if due(None) else total), items

    def spoilt_forward(self: TunedPart, key: Any, *args: Any, **more: Any) -> torch.Tensor:
        out = forward(self, key, *args, **more)
        return out * torch.nan if not self.segment.embed and due(self, key) else out

    def spoilt_backward(self: TunedPart, key: Any, *args: Any, **more: Any) -> torch.Tensor | None:
        out = backward(self, key, *args, **more)
        body = not self.segment.embed and not self.segment.head
        return out * torch.nan if body and out is not None and due(self, key) else out

    def kept(self: Recipe, *args: Any) -> Party:
        parties.append(party(self, *args))
        return parties[-1]

    monkeypatch.setattr(Recipe, "party", kept)
    monkeypatch.setattr(Heard, "windows", windows, raising=False)
    monkeypatch.setattr(test_tuning, "MemoryHub", Heard)
    if trouble == "loss":
        monkeypatch.setattr(Objective, "value", spoilt_value)
    elif trouble == "hidden":
        monkeypatch.setattr(TunedPart, "forward", spoilt_forward)
    else:
        monkeypatch.setattr(TunedPart, "backward", spoilt_backward)
    calm = {"u-shape": {"microbatches-per-window": 3, "max-inflight": 1, "timeout-seconds": 30}}
    made = config(folder, data, learning=calm)
    with pytest.raises((SplitlmError, ExceptionGroup)) as caught:
        run(made)
    text = paragraph(caught.value)
    assert "owner 0, window 1 of round 0" in text and "microbatch 1 of owner 0" in text
    assert any(isinstance(e, ModelError) for e in leaves(caught.value))
    assert {(w.round, w.window) for w in windows} == {(0, 0), (0, 1)} and {w.seq for w in windows} == {1, 2}
    monkeypatch.undo()
    rows = read_rows(made, "train")
    recipe = open_recipe(made, folder, rows.num_labels, dtype="float64")
    whole = UncutTrainer(
        recipe.files, recipe.shape, recipe.segments, recipe.goal, recipe.how, seed=made.server.random_seed
    )
    whole.window(0, 0, {0: OwnerData(recipe, 0, rows, None).round(0)[:3]})
    for of in parties:
        expected = whole.own[0] if of.role == "owner" else whole.body
        for name, parameter in of.parameters.items():
            torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-9, msg=name)


def test_no_number_at_a_last_stage_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    folder, data = model_folder("bert", tmp_path / "model", 0.2), rows_file(tmp_path, "classify")
    value, calls = Objective.value, [0]

    def spoilt(self: Objective, output: torch.Tensor, labels: torch.Tensor) -> Any:
        calls[0] += 1
        total, items = value(self, output, labels)
        return (total * torch.nan if calls[0] == 4 else total), items

    monkeypatch.setattr(Objective, "value", spoilt)
    with pytest.raises((SplitlmError, ExceptionGroup)) as caught:
        run(config(folder, data, **TWO_STAGE))
    text = paragraph(caught.value)
    assert "worker 0, window 3 of round 0" in text and "microbatch 0 of owner 0 is nan" in text
    assert calls == [4]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "w1 w2", "label": "joy"}, "label is 'joy'"),
        ({"text": "w1 w2"}, "label is missing"),
        ({"text": "w1 w2", "label": -1}, "label is -1"),
        ({"text": "w1 w2", "label": 1.5}, "label is 1.5"),
        ({"text": "w1 w2", "label": True}, "label is True"),
        ({"text": "w1 w2", "label": 1 << 40}, "label is 1099511627776"),
        ({"text": " \n", "label": 1}, "text is"),
        ({"label": 1}, "text is missing"),
    ],
)
def test_rows_that_cannot_be_used_are_named(row: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder, data = model_folder("bert", tmp_path / "model", 0.0), rows_file(tmp_path, "classify")
    lines = data.read_text().splitlines()
    data.write_text("\n".join([*lines[:2], json.dumps(row), *lines[2:]]))
    with pytest.raises((SplitlmError, ExceptionGroup)) as caught:
        run(config(folder, data))
    [error] = [e for e in leaves(caught.value) if isinstance(e, UsageError) and said in str(e)]
    assert "train.jsonl, line 3" in str(error) and error.exit_code == 2


@pytest.mark.parametrize(
    ("ids", "mask", "said"),
    [
        (torch.zeros(0, 3), torch.zeros(0, 3), "has no token"),
        (torch.zeros(2, 0), torch.zeros(2, 0), "has no token"),
        (torch.ones(2, 3), torch.tensor([[1, 1, 0], [0, 0, 0]]), "sample 1 is padding only"),
    ],
)
def test_a_batch_without_a_token_is_refused(ids: torch.Tensor, mask: torch.Tensor, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Microbatch(
            0, ids.long(), mask.to(torch.uint8), torch.zeros(len(ids), dtype=torch.int64), len(ids), 1, ids.numel()
        )
