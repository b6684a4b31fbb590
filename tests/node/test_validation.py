"""Owners validate with their own model before the average, and training is as if nobody had looked."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from splitlm.bus.memory import MemoryHub
from splitlm.core import training
from splitlm.core.config import RunConfig
from splitlm.core.cut import Segment
from splitlm.core.errors import SplitlmError
from splitlm.model.runner import Runner
from splitlm.model.seeding import Seeding
from splitlm.model.text import TextCodec
from splitlm.model.tunable import TunableFiles
from splitlm.model.tuned import TunedPart
from splitlm.model.uncut_train import UncutTrainer
from splitlm.node.party import PartySettings, run_party
from splitlm.node.trainlead import LeadSettings, lead
from tests.finetune.test_engine import CLASSIFY
from tests.node.test_tuning import TWO_STAGE, config, model_folder, rows_file, run, uncut
from tests.tiny_tune import CLASSES, batches, build

VALID = 10
STILL = {"learning-rate": 1e-30}
"""Nothing is learnt: for what does not depend on the order in which owners come."""


def write(path: Path, kind: str, rows: int = VALID, seed: int = 7) -> list[tuple[str, int]]:
    """Rows of a split; also as (text, class)."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    with path.open("w") as file:
        for _ in range(rows):
            words = torch.randint(0, 40, (int(torch.randint(2, 8, (1,), generator=generator)),), generator=generator)
            text, label = " ".join(f"w{int(w)}" for w in words), int(words.sum()) % CLASSES
            file.write(json.dumps({"text": text} | ({"label": label} if kind == "classify" else {})) + "\n")
            made.append((text, label))
    return made


def measured(model: Any, codec: TextCodec, rows: Sequence[tuple[str, int]], kind: str) -> tuple[float, int, float]:
    """Loss over its items, their number, and how many are right, by transformers alone, row by row."""
    loss, items, right = 0.0, 0, 0.0
    for text, label in rows:
        ids = codec.encode(text)
        with torch.no_grad():
            if kind == "classify":
                out = model(torch.tensor([ids]), labels=torch.tensor([label]))
                mean, count, correct = float(out.loss), 1, float(out.logits.argmax(-1) == label)
            else:
                given = torch.tensor([[*ids, min(codec.eos_ids)]])
                logits, wanted = model(given).logits[0, :-1], given[0, 1:]
                count, correct = len(wanted), float((logits.argmax(-1) == wanted).sum())
                # transformers computes this in float32, whatever the model's own type
                mean = float(torch.nn.functional.cross_entropy(logits, wanted))
        loss, items, right = loss + mean * count, items + count, right + correct
    return loss, items, right


def plain(folder: Path, kind: str, weights: dict[str, torch.Tensor] | None = None) -> Any:
    """The model as transformers loads it, with these weights."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    auto = AutoModelForSequenceClassification if kind == "classify" else AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float64)
    if weights is not None:
        if kind == "text":  # in two-stage the head's table goes its own way
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        missing, odd = model.load_state_dict(weights, strict=False)
        assert not odd
        assert all(name.endswith("position_ids") for name in missing)
    return model.eval()


def rounds(done: Any) -> list[dict[str, Any]]:
    return [row for kind, row in done.records if kind == "round"]


@pytest.mark.parametrize(
    ("family", "dropout", "owners", "workers", "more"),
    [
        ("bert", 0.2, 1, 1, {}),
        ("gpt2", 0.1, 2, 1, {}),
        ("bert", 0.2, 2, 2, {"learning": {"body-sync": "window"}}),
        ("bert", 0.2, 1, 1, TWO_STAGE),
        ("gpt2", 0.2, 1, 1, TWO_STAGE | {"learning": {"control-count": 4}}),
        ("gpt2", 0.2, 2, 1, TWO_STAGE | {"learning": STILL}),
    ],
)
def test_owners_find_what_transformers_finds_of_their_own_models(
    family: str, dropout: float, owners: int, workers: int, more: dict[str, Any], tmp_path: Path
) -> None:
    kind = "classify" if family == "bert" else "text"
    folder = model_folder(family, tmp_path / "model", dropout)
    data = rows_file(tmp_path, kind)
    valid = write(tmp_path / "validation.jsonl", kind)
    server = more.get("server", {}) | {"clients": [owners, workers], "validation": True}
    made = config(folder, data, **{**more, "server": server})
    codec, expected = TextCodec(folder), []

    def before(whole: UncutTrainer) -> None:
        found = []
        for part in whole.parts:
            found.append(measured(plain(folder, kind, part.weights()), codec, valid, kind))
        expected.append(tuple(map(sum, zip(*found, strict=True))))

    if more.get("learning") == STILL:
        one = measured(plain(folder, kind), codec, valid, kind)
        expected = [tuple(owners * x for x in one)] * 2
    else:
        uncut(made, folder, before=before)
    rows = rounds(run(made))
    assert len(rows) == len(expected) == 2
    for row, (loss, items, right) in zip(rows, expected, strict=True):
        assert row["valid_loss"] == pytest.approx(loss / items, abs=1e-9)
        assert row["accuracy"] == right / items
        assert ("valid_perplexity" in row) == (kind == "text")
        assert row["repeated"] == 0
    if kind == "text":
        assert rows[0]["valid_perplexity"] == pytest.approx(float(torch.exp(torch.tensor(rows[0]["valid_loss"]))))


@pytest.mark.parametrize(
    ("owners", "workers", "more"),
    [(2, 2, {"learning": {"u-shape": {"microbatches-per-window": 3, "adaptive-weights": False}}}), (1, 1, TWO_STAGE)],
)
def test_training_is_as_if_nobody_had_looked(owners: int, workers: int, more: dict[str, Any], tmp_path: Path) -> None:
    folder = model_folder("bert", tmp_path / "model", 0.2)
    data = rows_file(tmp_path, "classify")
    write(tmp_path / "validation.jsonl", "classify", rows=11)
    found = []
    for validation in (False, True):
        server = more.get("server", {}) | {"clients": [owners, workers], "validation": validation}
        done = run(config(folder, data, **{**more, "server": server}))
        found.append(done)
        assert all(("accuracy" in row) == validation for row in rounds(done))
    without, with_ = found
    for role, tensors in without.averages.items():
        assert all(torch.equal(tensor, with_.averages[role][name]) for name, tensor in tensors.items())
    assert [r["windows"] for r in rounds(without)] == [r["windows"] for r in rounds(with_)]
    assert [r["samples"] for r in rounds(without)] == [r["samples"] for r in rounds(with_)]
    assert [r["loss"] for r in rounds(without)] == [r["loss"] for r in rounds(with_)]


def test_looking_takes_dropout_off_and_leaves_the_generator_alone(tmp_path: Path) -> None:
    files = TunableFiles(build("bert", tmp_path, 0.5), seed=3)
    seeding = Seeding(5)
    whole = Segment(0, files.blocks, embed=True, head=True)
    part = TunedPart(files.load([whole])[0], files, seeding=seeding)
    (batch,) = batches(1, classify=True, seed=2)
    before = torch.get_rng_state()
    one, two = (part.outputs(batch.ids, batch.mask, CLASSIFY) for _ in range(2))
    hidden = part.forward((0, 0), batch.ids, batch.mask, keep=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, two)
    assert not hidden.requires_grad
    assert part.live == 0
    seeding.at(0, 0, 0, 0)
    part.forward((0, 0), batch.ids, batch.mask)
    assert not torch.equal(torch.get_rng_state(), before), "dropout is back on"
    with pytest.raises(SplitlmError):
        part.outputs(batch.ids[:, :0], batch.mask, CLASSIFY)
    assert part.part.module.training


@pytest.mark.parametrize("more", [{}, TWO_STAGE], ids=["u-shape", "two-stage"])
def test_without_rows_one_line_says_so_and_the_run_goes_on(
    more: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = model_folder("bert", tmp_path / "model", 0.0)
    server = more.get("server", {}) | {"validation": True}
    made = config(folder, rows_file(tmp_path, "classify"), **{**more, "server": server})
    with caplog.at_level(logging.INFO):
        rows = rounds(run(made))
    assert len(rows) == 2
    assert not any({"valid_loss", "accuracy"} & row.keys() for row in rows)
    assert sum("Nothing is validated here" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("more", [{}, TWO_STAGE], ids=["u-shape", "two-stage"])
def test_an_owner_without_rows_leaves_it_to_the_others(more: dict[str, Any], tmp_path: Path) -> None:
    folder = model_folder("bert", tmp_path / "model", 0.3)
    data = rows_file(tmp_path, "classify")
    own = {}
    for name in ("owner0", "owner1"):
        (tmp_path / name).mkdir()
        own[name] = Path(shutil.copy(data, tmp_path / name / "train.jsonl"))
    valid = write(tmp_path / "owner1" / "validation.jsonl", "classify")
    server = more.get("server", {}) | {"clients": [2, 1], "validation": True, "global-round": 1}
    (row,) = rounds(run(config(folder, data, **{**more, "server": server, "learning": STILL}), own=own))
    loss, items, right = measured(plain(folder, "classify"), TextCodec(folder), valid, "classify")
    assert row["valid_loss"] == pytest.approx(loss / items, abs=1e-9)
    assert row["accuracy"] == right / items


@pytest.mark.parametrize("more", [{}, TWO_STAGE], ids=["u-shape", "two-stage"])
def test_who_computes_says_that_it_is_at_work(
    more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[str, Any]] = []

    class Hub(MemoryHub):
        async def receive(self) -> tuple[str, Any]:
            heard.append(found := await super().receive())
            return found

    monkeypatch.setattr("tests.node.test_tuning.MemoryHub", Hub)
    folder = model_folder("bert", tmp_path / "model", 0.0)
    data = rows_file(tmp_path, "classify")
    write(tmp_path / "validation.jsonl", "classify")
    server = more.get("server", {}) | {"validation": True, "global-round": 1}
    quick = {"u-shape": {"microbatches-per-window": 3, "timeout-seconds": 30}}
    monkeypatch.setattr("splitlm.node.pulse.PART", 1e-4)
    run(config(folder, data, **{**more, "server": server, "learning": quick}))
    said = [peer.split("#")[0] for peer, event in heard if isinstance(event, training.Working)]
    assert {"owner0", "worker0"} == set(said)


def test_the_sum_of_a_single_row_does_not_leave(tmp_path: Path) -> None:
    folder = model_folder("bert", tmp_path / "model", 0.0)
    data = rows_file(tmp_path, "classify")
    write(tmp_path / "validation.jsonl", "classify", rows=1)
    rows = rounds(run(config(folder, data, server={"validation": True, "global-round": 1})))
    assert "valid_loss" not in rows[0]


def test_damaged_rows_end_the_run(tmp_path: Path) -> None:
    folder = model_folder("bert", tmp_path / "model", 0.0)
    data = rows_file(tmp_path, "classify")
    (tmp_path / "validation.jsonl").write_text('{"text": "w1", "label": 0}\n{"text": ')
    with pytest.raises(ExceptionGroup) as errors:
        run(config(folder, data, server={"validation": True}))
    assert "line 2" in " ".join(map(str, _leaves(errors.value))), "the owner's own process says where"


def _leaves(group: BaseExceptionGroup[Any]) -> list[BaseException]:
    return [e for one in group.exceptions for e in (_leaves(one) if isinstance(one, BaseExceptionGroup) else [one])]


def led(made: RunConfig, folder: Path | None = None) -> list[dict[str, Any]]:
    """The rounds of a run with a coordinator's process, in float32."""
    rows: list[dict[str, Any]] = []

    async def main() -> None:
        hub, runner = MemoryHub(), Runner()
        settings = LeadSettings(
            made,
            lambda name, _: Path(name),
            folder,
            advertise="127.0.0.1",
            deadline_s=20.0,
            record=lambda kind, row: rows.append(row) if kind == "round" else None,
        )
        try:
            async with asyncio.TaskGroup() as group:
                for role in ("owner", "worker"):
                    party = PartySettings(role, made, lambda name, _: Path(name))  # type: ignore[arg-type]
                    group.create_task(run_party(party, hub.join(role, "127.0.0.1"), runner))
                await lead(settings, hub)
        finally:
            await hub.close()
            runner.close()

    asyncio.run(main())
    return rows


@pytest.mark.parametrize(
    ("family", "more"),
    [("bert", {}), ("bert", TWO_STAGE), ("llama", TWO_STAGE)],
    ids=["u-shape", "two-stage", "language-model"],
)
def test_the_coordinator_evaluates_the_model_that_it_leaves(family: str, more: dict[str, Any], tmp_path: Path) -> None:
    kind = "classify" if family == "bert" else "text"
    model = model_folder(family, tmp_path / "model", 0.2)
    data = rows_file(tmp_path, kind)
    test = write(tmp_path / "test.jsonl", kind, seed=9)
    write(tmp_path / "validation.jsonl", kind, seed=8)
    server = more.get("server", {}) | {"validation": True}
    row = led(config(model, data, **{**more, "server": server}), tmp_path / "run")[-1]
    loss, items, right = measured(plain(tmp_path / "run" / "model", kind), TextCodec(model), test, kind)
    assert row["central_loss"] == pytest.approx(loss / items, abs=1e-5)
    assert "valid_loss" in row
    if kind == "classify":
        assert row["central_accuracy"] == right / items
        assert "perplexity" not in row
    else:
        assert row["perplexity"] == pytest.approx(float(torch.exp(torch.tensor(loss / items))), rel=1e-5)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    kept = [json.loads(line) for line in lines]
    assert [line["central_loss"] for line in kept if line["record"] == "round"][-1] == row["central_loss"]


def test_the_coordinator_takes_validation_rows_where_there_is_no_test(tmp_path: Path) -> None:
    model = model_folder("bert", tmp_path / "model", 0.0)
    data = rows_file(tmp_path, "classify")
    valid = write(tmp_path / "validation.jsonl", "classify")
    made = config(model, data, server={"validation": True, "global-round": 1}, learning=STILL)
    (row,) = led(made)
    _, items, right = measured(plain(model, "classify"), TextCodec(model), valid, "classify")
    assert row["central_accuracy"] == row["accuracy"] == right / items


@pytest.mark.parametrize(("more", "lines"), [({}, 0), (TWO_STAGE, 1)], ids=["u-shape", "two-stage"])
def test_a_coordinator_without_rows_evaluates_nothing(
    more: dict[str, Any], lines: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_folder("bert", tmp_path / "model", 0.0)
    server = more.get("server", {}) | {"validation": True, "global-round": 1}
    made = config(model, rows_file(tmp_path, "classify"), **{**more, "server": server})
    (row,) = led(made)
    assert not [name for name in row if name.startswith("central")]
    assert sum("no central evaluation" in line for line in caplog.messages) == lines


def test_nothing_is_evaluated_where_validation_is_off(tmp_path: Path) -> None:
    model = model_folder("bert", tmp_path / "model", 0.0)
    data = rows_file(tmp_path, "classify")
    for split in ("test", "validation"):
        write(tmp_path / f"{split}.jsonl", "classify")
    (row,) = led(config(model, data, server={"global-round": 1}))
    assert row.keys() == {"round", "windows", "repeated", "samples", "loss"}


def test_damaged_rows_at_the_coordinator_end_the_run_before_it_begins(tmp_path: Path) -> None:
    model = model_folder("bert", tmp_path / "model", 0.0)
    data = rows_file(tmp_path, "classify")
    (tmp_path / "test.jsonl").write_text("[]\n")
    made = config(model, data, server={"validation": True})

    async def main() -> None:
        hub = MemoryHub()
        try:
            await lead(LeadSettings(made, lambda name, _: Path(name)), hub)
        finally:
            await hub.close()

    with pytest.raises(SplitlmError, match=r"test\.jsonl, line 1"):
        asyncio.run(main())
