"""Whole runs in this process: coordinator, aggregator and parties over loopback, equal to the uncut loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from splitlm.bus.memory import MemoryHub
from splitlm.coordinator.orders import Orders
from splitlm.coordinator.training import Training
from splitlm.core.config import RunConfig, read, resolved
from splitlm.core.errors import SplitlmError
from splitlm.finetune.batch import Microbatch
from splitlm.finetune.recipe import OwnerData, open_recipe, read_rows
from splitlm.link import tcp
from splitlm.model.runner import Runner
from splitlm.model.uncut_train import UncutTrainer
from splitlm.node.aggregator import StateHub
from splitlm.node.party import PartySettings, run_party
from splitlm.wire.frame import PROTOCOL
from splitlm.wire.handshake import Claims, Identity
from tests.tiny_tune import CLASSES, build

ROWS = 40
TWO_STAGE: dict[str, Any] = {"server": {"architecture": "two-stage", "cut-layers": 2}}


def rows_file(folder: Path, kind: str) -> Path:
    """Sentences of a small vocabulary; their class is the number of one of the words."""
    generator = torch.Generator().manual_seed(1)
    path = folder / "train.jsonl"
    with path.open("w") as file:
        for _ in range(ROWS):
            words = torch.randint(0, 40, (int(torch.randint(2, 8, (1,), generator=generator)),), generator=generator)
            text = " ".join(f"w{int(w)}" for w in words)
            row = {"text": text} | ({"label": int(words.sum()) % CLASSES} if kind == "classify" else {})
            file.write(json.dumps(row) + "\n")
    return path


def model_folder(family: str, folder: Path, dropout: float) -> Path:
    """A tiny model with a tokenizer of one token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    build(family, folder, dropout)
    words = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(40))])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


def config(folder: Path, data: Path, **changes: Any) -> RunConfig:
    server: dict[str, Any] = {
        "architecture": "u-shape",
        "clients": [1, 1],
        "global-round": 2,
        "tail-blocks": 1,
        "model-path": str(folder),
        "data-path": str(data),
        "validation": False,
    }
    learning: dict[str, Any] = {
        "learning-rate": 1e-2,
        "batch-size": 3,
        "clip-grad-norm": 0.5,
        "u-shape": {"microbatches-per-window": 3, "timeout-seconds": 30},
    }
    server |= changes.pop("server", {})
    learning |= changes.pop("learning", {})
    made = read({"server": server, "learning": learning, **changes}, "test")
    made.check()
    return made


@dataclass
class Run:
    """A finished run."""

    averages: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    records: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


def run(made: RunConfig, *, dtype: str = "float64", own: Mapping[str, Path] | None = None) -> Run:
    """Run it with all roles here. One compute thread: dropout's generator is the process's own.

    Args:
        own: files of rows that are a party's own, by what it is called (``owner0``).
    """
    done = Run()

    async def main() -> None:
        hub, runner = MemoryHub(), Runner()
        claims = Claims(node="aggregator", version=_version(), protocol=PROTOCOL, role="aggregator", ring="r")
        failed: list[SplitlmError] = []
        door = await tcp.listen("127.0.0.1", 0, Identity(claims), "state", expect_peer="a party")
        states = StateHub(door, runner, None, "factors", failed.append)
        orders = Orders(
            shape=made.shape,
            owners=made.server.owners,
            workers=made.server.workers,
            rounds=made.server.global_round,
            settings=resolved(made),
            run="r",
            aggregator=("127.0.0.1", door.port),
            timeout_s=20.0,
            validate=made.server.validation,
        )
        lead = Training(hub, orders, states, say=done.said.append, record=lambda k, r: done.records.append((k, r)))
        try:
            async with asyncio.TaskGroup() as group:
                for role, count in (("owner", made.server.owners), ("worker", made.server.workers)):
                    for number in range(count):
                        name = f"{role}{number}"
                        settings = PartySettings(
                            role,  # type: ignore[arg-type]
                            made,
                            lambda name, _: Path(name),
                            own_data=(own or {}).get(name),
                            dtype=dtype,
                        )
                        group.create_task(run_party(settings, hub.join(name, "127.0.0.1"), runner))
                await lead.run()
        finally:
            await states.close()
            await hub.close()
            runner.close()
        assert not failed
        done.averages = states.averages  # type: ignore[assignment]

    asyncio.run(main())
    return done


def _version() -> str:
    import splitlm

    return splitlm.__version__


def uncut(
    made: RunConfig, folder: Path, *, dtype: str = "float64", before: Callable[[UncutTrainer], None] = lambda _: None
) -> UncutTrainer:
    """The same run without a cut: FedAvg of owners at each round's end, one body.

    Args:
        before: told of each round's end before its average.
    """
    rows = read_rows(made, "train")
    recipe = open_recipe(made, folder, rows.num_labels, dtype=dtype)
    owners = made.server.owners
    data = [OwnerData(recipe, number, rows, None) for number in range(owners)]
    whole = UncutTrainer(
        recipe.files,
        recipe.shape,
        recipe.segments,
        recipe.goal,
        recipe.how,
        owners=owners,
        seed=made.server.random_seed,
        lora=recipe.lora,
        frozen_embedding=recipe.frozen_embedding,
        token_weighted=made.learning.loss_weighting == "token",
    )
    most = made.learning.u_shape.microbatches_per_window if made.shape.agreed else made.learning.control_count
    for round_ in range(made.server.global_round):
        batches: list[list[Microbatch]] = [of.round(round_) for of in data]
        for number in range(max(-(-len(b) // most) for b in batches)):
            if not made.shape.agreed:
                whole.steps(round_, number, batches[0][number * most : (number + 1) * most])
                continue
            whole.window(round_, number, {o: b[number * most : (number + 1) * most] for o, b in enumerate(batches)})
        before(whole)
        whole.average([sum(m.samples for m in b) for b in batches])
    return whole


@pytest.mark.parametrize(
    ("family", "dropout", "owners", "workers", "more"),
    [
        ("bert", 0.2, 1, 1, {}),
        ("llama", 0.0, 1, 1, {"fine-tune": {"name": "LoRA", "LoRA": {"r": 4, "alpha": 8}}}),
        ("gpt2", 0.1, 2, 1, {}),
        ("bert", 0.2, 2, 2, {"learning": {"body-sync": "window"}}),
        ("bert", 0.2, 1, 1, TWO_STAGE),
        ("gpt2", 0.2, 1, 1, TWO_STAGE | {"learning": {"control-count": 4}}),
        ("llama", 0.2, 1, 1, TWO_STAGE | {"learning": {"control-count": 4}}),
        ("llama", 0.0, 2, 3, {"learning": {"body-sync": "window", "loss-weighting": "token"}}),
    ],
)
def test_a_run_equals_the_uncut_loop(
    family: str, dropout: float, owners: int, workers: int, more: dict[str, Any], tmp_path: Path
) -> None:
    folder = model_folder(family, tmp_path / "model", dropout)
    data = rows_file(tmp_path, "classify" if family == "bert" else "text")
    server = {"clients": [owners, workers]} | more.get("server", {})
    made = config(folder, data, **{**more, "server": server})
    done, whole = run(made), uncut(made, folder)
    for name, tensor in done.averages["owner"].items():
        torch.testing.assert_close(tensor, whole.own[0][name].detach(), rtol=0, atol=1e-9)
    for name, tensor in done.averages["worker"].items():
        torch.testing.assert_close(tensor, whole.body[name].detach(), rtol=0, atol=1e-9)
    assert done.averages["owner"].keys() == whole.own[0].keys()
    assert done.averages["worker"].keys() == whole.body.keys()
    rounds = [row for kind, row in done.records if kind == "round"]
    assert [row["samples"] for row in rounds] == [ROWS, ROWS]
    assert rounds[0]["repeated"] == 0
