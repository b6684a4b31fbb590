"""Whole runs in this process equal the uncut loop: uneven owners, idle workers, drifting bodies, odd settings."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from splitlm.core.config import RunConfig
from splitlm.finetune.batch import Microbatch
from splitlm.finetune.recipe import OwnerData, open_recipe, read_rows
from splitlm.model.uncut_train import UncutTrainer
from splitlm.planner.routing import SmoothWRR
from tests.node.test_tuning import TWO_STAGE, Run, config, model_folder, rows_file, run

SETTLED = {"u-shape": {"microbatches-per-window": 3, "timeout-seconds": 30, "adaptive-weights": False}}
"""Turns of workers that do not depend on clocks."""
LORA = {"fine-tune": {"name": "LoRA", "LoRA": {"r": 4, "alpha": 8}}}


def turns(made: RunConfig) -> list[SmoothWRR[int]]:
    return [SmoothWRR(dict.fromkeys(range(made.server.workers), 1.0)) for _ in range(made.server.owners)]


def uncut(made: RunConfig, folder: Path) -> UncutTrainer:
    """The same run without a cut: workers that meet at a round's end have a body each."""
    rows = read_rows(made, "train")
    recipe = open_recipe(made, folder, rows.num_labels, dtype="float64")
    data = [OwnerData(recipe, number, rows, None) for number in range(made.server.owners)]
    drift = made.shape.agreed and made.learning.body_sync == "round"
    whole = UncutTrainer(
        recipe.files,
        recipe.shape,
        recipe.segments,
        recipe.goal,
        recipe.how,
        owners=made.server.owners,
        bodies=made.server.workers if drift else 1,
        seed=made.server.random_seed,
        lora=recipe.lora,
        frozen_embedding=recipe.frozen_embedding,
        token_weighted=made.learning.loss_weighting == "token",
    )
    most = made.learning.u_shape.microbatches_per_window if made.shape.agreed else made.learning.control_count
    for round_ in range(made.server.global_round):
        if made.optimizer.reset_each_round and round_:
            whole.reset()
        batches = [of.round(round_) for of in data]
        whose = turns(made)
        worked = [0] * len(whole.bodies)
        for number in range(max(-(-len(b) // most) for b in batches)):
            now = {o: b[number * most : (number + 1) * most] for o, b in enumerate(batches)}
            if not made.shape.agreed:
                whole.steps(round_, number, now[0])
                continue
            assign = {o: [_chosen(whose[o], made.server.workers) for _ in b] for o, b in now.items()}
            if not drift:
                assign = {o: [0] * len(b) for o, b in now.items()}
            for owner, of in now.items():
                for index, batch in enumerate(of):
                    worked[assign[owner][index]] += batch.samples
            whole.window(round_, number, now, assign)
        whole.average([samples(b) for b in batches], worked)
    return whole


def _chosen(of: SmoothWRR[int], workers: int) -> int:
    found = of.choose(range(workers))
    assert found is not None
    return found


def samples(batches: Sequence[Microbatch]) -> int:
    return sum(batch.samples for batch in batches)


def assert_equal(done: Run, whole: UncutTrainer) -> None:
    for role, expected in (("owner", whole.own[0]), ("worker", whole.body)):
        assert done.averages[role].keys() == expected.keys()
        for name, tensor in done.averages[role].items():
            torch.testing.assert_close(tensor, expected[name].detach(), rtol=0, atol=1e-9, msg=f"{role} {name}")


def few_rows(folder: Path, count: int, kind: str) -> Path:
    """The first rows of ``rows_file``, so that some owners go without."""
    path = rows_file(folder, kind)
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:count]))
    return path


CASES: dict[str, tuple[str, float, list[int], int, dict[str, Any]]] = {
    # family, dropout, [owners, workers], rows (0: all), settings
    "bodies drift, token mean": ("gpt2", 0.1, [1, 2], 0, {"learning": {"loss-weighting": "token", **SETTLED}}),
    "bodies drift, two owners": ("bert", 0.2, [2, 2], 0, {"learning": SETTLED}),
    "a worker without work": ("bert", 0.0, [1, 3], 7, {"learning": {"batch-size": 2, "weight-decay": 0.5, **SETTLED}}),
    "owners of 2, 1 and 0 rows": ("gpt2", 0.1, [3, 1], 2, {"learning": SETTLED}),
    "one body, four workers": ("gpt2", 0.1, [2, 4], 0, {"learning": {"body-sync": "window"}}),
    "window, no work for some": ("llama", 0.0, [1, 4], 5, {"learning": {"body-sync": "window", "batch-size": 2}}),
    "no clipping, reset": (
        "bert",
        0.2,
        [1, 1],
        0,
        {"learning": {"clip-grad-norm": 0}, "optimizer": {"reset-each-round": True}},
    ),
    "no front, no tail": ("gpt2", 0.1, [1, 1], 0, {"server": {"cut-layers": 0, "tail-blocks": 0}}),
    "no front, LoRA": ("llama", 0.0, [2, 1], 0, {"server": {"cut-layers": 0, "tail-blocks": 0}, **LORA}),
    "LoRA, drifting bodies": ("bert", 0.2, [2, 2], 0, {"learning": SETTLED, **LORA}),
    "fewer blocks": ("bert", 0.2, [1, 1], 0, {"server": {"model": {"Bert": {"n_block": 3}}}}),
    "window of one": ("llama-untied", 0.2, [1, 1], 0, {"learning": {"u-shape": {"microbatches-per-window": 1}}}),
    "two stages, LoRA": ("bert", 0.2, [1, 1], 0, {**TWO_STAGE, **LORA, "learning": {"control-count": 4}}),
    "two stages, no front": ("gpt2", 0.2, [1, 1], 0, {"server": {**TWO_STAGE["server"], "cut-layers": 0}}),
}


@pytest.mark.parametrize("case", list(CASES))
def test_a_run_equals_the_uncut_loop(case: str, tmp_path: Path) -> None:
    family, dropout, clients, rows, more = CASES[case]
    folder = model_folder(family, tmp_path / "model", dropout)
    kind = "classify" if family == "bert" else "text"
    data = few_rows(tmp_path, rows, kind) if rows else rows_file(tmp_path, kind)
    made = config(folder, data, **{**more, "server": {"clients": clients, **more.get("server", {})}})
    done = run(made)
    assert_equal(done, uncut(made, folder))
    rounds = [row for what, row in done.records if what == "round"]
    assert [row["repeated"] for row in rounds] == [0] * made.server.global_round
    assert {row["samples"] for row in rounds} == {len(data.read_text().splitlines())}


@pytest.mark.parametrize("lora", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "llama-untied"])
def test_fifty_windows_equal_the_uncut_loop(family: str, lora: dict[str, Any], tmp_path: Path) -> None:
    """With dropout, in float64, at a learning rate of 1e-2 and AdamW's own eps."""
    folder = model_folder(family, tmp_path / "model", 0.2)
    data = rows_file(tmp_path, "classify" if family == "bert" else "text")
    made = config(folder, data, server={"global-round": 10}, **lora)
    done = run(made)
    assert_equal(done, uncut(made, folder))
    rounds = [row for what, row in done.records if what == "round"]
    assert sum(row["windows"] for row in rounds) == 50


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_two_clients_share_a_last_stage(family: str, count: int, tmp_path: Path) -> None:
    """The last stage steps in the order of arrival, so weights are not promised; sums and counts are."""
    folder = model_folder(family, tmp_path / "model", 0.2)
    data = rows_file(tmp_path, "classify" if family == "bert" else "text")
    server = TWO_STAGE["server"] | {"clients": [2, 1]}
    made = config(folder, data, server=server, learning={"control-count": count, "learning-rate": 1e-3})
    done = run(made)
    rows = read_rows(made, "train")
    recipe = open_recipe(made, folder, rows.num_labels, dtype="float64")
    of = [OwnerData(recipe, number, rows, None) for number in range(2)]
    rounds = [row for what, row in done.records if what == "round"]
    windows = [row for what, row in done.records if what == "window"]
    assert [row["samples"] for row in rounds] == [sum(samples(o.round(r)) for o in of) for r in range(2)]
    for number, row in enumerate(rounds):
        mine = [w for w in windows if w["round"] == number]
        items = [batch.weight for owner in of for batch in owner.round(number)]
        assert len(mine) == sum(-(-len(owner.round(number)) // count) for owner in of)
        for at, owner in enumerate(of):
            numbers = [w["window"] for w in mine if w["party"] == f"owner {at}"]
            assert numbers == list(range(-(-len(owner.round(number)) // count)))
        assert sum(w["items"] for w in mine) == sum(items)
        mean = sum(w["loss"] * w["items"] for w in mine) / sum(items)
        assert row["loss"] == pytest.approx(mean, rel=1e-12)
        assert 0 < mean < 2 * math.log(96)
    assert rounds[1]["loss"] < rounds[0]["loss"]
    for tensors in done.averages.values():
        assert all(bool(torch.isfinite(t).all()) for t in tensors.values())


def test_an_owner_may_lack_a_class(tmp_path: Path) -> None:
    """A head of as many classes as the owner has that knows most."""
    folder = model_folder("bert", tmp_path / "model", 0.0)
    data = rows_file(tmp_path, "classify")
    made = config(
        folder,
        data,
        server={"clients": [2, 1], "data-distribution": {"non-iid": True, "dirichlet": {"alpha": 0.05}}},
    )
    rows = read_rows(made, "train")
    recipe = open_recipe(made, folder, rows.num_labels, dtype="float64")
    labels = [
        {int(x) for batch in OwnerData(recipe, number, rows, None).round(0) for x in batch.labels}
        for number in range(2)
    ]
    assert labels[0] != labels[1] and len({json.loads(line)["label"] for line in data.open()}) == 4
    assert_equal(run(made), uncut(made, folder))
