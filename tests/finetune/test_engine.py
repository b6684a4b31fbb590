"""Parties that train over links equal the uncut model; what links repeat changes nothing, and no graph is left."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from splitlm.core.shape import cut_for, find_shape
from splitlm.finetune.batch import Microbatch
from splitlm.finetune.crossing import Crossing
from splitlm.finetune.engine import Engine, WindowPlan
from splitlm.finetune.objective import Objective
from splitlm.finetune.party import Party
from splitlm.finetune.plane import Plane
from splitlm.finetune.window import WindowScale
from splitlm.link.memory import pair
from splitlm.model.runner import Runner
from splitlm.model.seeding import Seeding
from splitlm.model.stepping import Stepping
from splitlm.model.tunable import TunableFiles
from splitlm.model.tuned import TunedPart
from splitlm.model.uncut_train import UncutTrainer
from splitlm.wire.frame import PROTOCOL
from splitlm.wire.handshake import Claims
from tests.tiny_tune import Batch, batches, build

CLASSIFY = Objective(needs_mask=True, token_loss=False, shift_labels=False, label_key="label")
CAUSAL = Objective(needs_mask=True, token_loss=True, shift_labels=True, label_key="ids")
HOW = Stepping(learning_rate=1e-2, clip_grad_norm=0.5)


def micro(batch: Batch, index: int) -> Microbatch:
    rows, width = batch.ids.shape
    return Microbatch(index, batch.ids, batch.mask, batch.labels, rows, batch.weight, rows * width)


class Room:
    """Owners and workers in this process, with one compute thread: dropout's generator is the process's own."""

    def __init__(
        self,
        files: TunableFiles,
        shape: str,
        owners: int,
        workers: int,
        goal: Objective,
        seed: int | None,
        noise: float = 0.0,
    ) -> None:
        self.shape = find_shape(shape)
        self.segments = cut_for(self.shape, files.blocks, 1, 1)
        self.runner = Runner()
        self.engines: dict[tuple[str, int], Engine] = {}
        self.parties: dict[tuple[str, int], Party] = {}
        self.planes: dict[tuple[str, int], Plane] = {}
        self.lost: list[Any] = []
        for role, count in (("owner", owners), ("worker", workers)):
            for number in range(count):
                seeding = Seeding(seed) if seed is not None else None
                at = self.shape.parts_of(role)  # type: ignore[arg-type]
                loaded = files.load([self.segments[i] for i in at])
                parts = {i: TunedPart(part, files, seeding=seeding) for i, part in zip(at, loaded, strict=True)}
                party = Party(self.shape, role, number, parts, goal, HOW, seeding)  # type: ignore[arg-type]
                plane = Plane(lambda who, error: self.lost.append((who, error)))
                self.parties[role, number], self.planes[role, number] = party, plane
                self.engines[role, number] = Engine(party, plane, self.runner, 20.0, Crossing(role, noise=noise))  # type: ignore[arg-type]
        for owner in range(owners):
            for worker in range(workers):
                for lane in ("activation", "gradient"):
                    a, b = (Claims(node=n, version="1", protocol=PROTOCOL) for n in ("owner", "worker"))
                    left, right = pair(a, b, purpose=lane)  # type: ignore[arg-type]
                    self.planes["owner", owner].attach(("worker", worker), lane, left)  # type: ignore[arg-type]
                    self.planes["worker", worker].attach(("owner", owner), lane, right)  # type: ignore[arg-type]

    async def window(self, number: int, of: dict[int, Sequence[Microbatch]], assign: dict[int, list[int]]) -> None:
        total = sum(map(len, of.values()))
        orders = {("owner", o): [(o, i) for i in range(len(b))] for o, b in of.items()}
        workers = {w for r, w in self.engines if r == "worker"}
        for w in workers:
            orders["worker", w] = [(o, i) for o in sorted(of) for i, at in enumerate(assign[o]) if at == w]
        async with asyncio.TaskGroup() as group:
            for who, engine in self.engines.items():
                mine = who[0] == "owner"
                plan = WindowPlan(
                    seq=number + 1,
                    round=0,
                    number=number,
                    order=orders[who],
                    scale=WindowScale(total, len(orders[who])),
                    batches=of[who[1]] if mine else (),
                    assign=assign[who[1]] if mine else (),
                    credit=2,
                    inflight=2,
                )
                group.create_task(engine.window(plan))
        for party in self.parties.values():
            party.step()
            assert party.live == 0

    async def close(self) -> None:
        for plane in self.planes.values():
            await plane.close()
        self.runner.close()


@pytest.mark.parametrize(("family", "dropout", "owners"), [("bert", 0.2, 1), ("llama", 0.0, 2), ("gpt2", 0.2, 2)])
def test_a_window_over_links_equals_the_uncut_loop(family: str, dropout: float, owners: int, tmp_path: Path) -> None:
    files = TunableFiles(build(family, tmp_path, dropout), dtype="float64", seed=3)
    goal = CLASSIFY if family == "bert" else CAUSAL
    seed = 5 if dropout else None

    async def main() -> Room:
        room = Room(files, "u-shape", owners, 1, goal, seed)
        whole = UncutTrainer(files, room.shape, room.segments, goal, HOW, owners=owners, seed=seed)
        try:
            for number in range(4):
                of = {o: batches(3 + o, classify=family == "bert", seed=10 * o + number) for o in range(owners)}
                await room.window(
                    number,
                    {o: [micro(b, i) for i, b in enumerate(made)] for o, made in of.items()},
                    {o: [0] * len(made) for o, made in of.items()},
                )
                whole.window(0, number, of)
            assert not room.lost
        finally:
            await room.close()
        for o in range(owners):
            for name, parameter in room.parties["owner", o].parameters.items():
                torch.testing.assert_close(parameter, whole.own[o][name], rtol=0, atol=1e-9)
        for name, parameter in room.parties["worker", 0].parameters.items():
            torch.testing.assert_close(parameter, whole.body[name], rtol=0, atol=1e-9)
        for engine in room.engines.values():
            assert 0 < engine.peak_live <= 2 * owners
        return room

    asyncio.run(main())


def test_noise_reaches_the_worker_and_what_was_done_is_counted(tmp_path: Path) -> None:
    files = TunableFiles(build("bert", tmp_path), dtype="float64", seed=3)
    given = [micro(batch, i) for i, batch in enumerate(batches(2, classify=True, seed=3))]

    async def main(noise: float) -> dict[str, torch.Tensor]:
        room = Room(files, "u-shape", 1, 1, CLASSIFY, None, noise)
        try:
            await room.window(0, {0: given}, {0: [0, 0]})
        finally:
            await room.close()
        for engine in room.engines.values():
            assert engine.compute_s > 0 and engine.wait_s > 0 and 1 <= engine.peak_live <= 2
        return {name: p.detach() for name, p in room.parties["worker", 0].parameters.items()}

    plain, same, noisy = (asyncio.run(main(noise)) for noise in (0.0, 0.0, 0.3))
    assert all(torch.equal(plain[name], same[name]) for name in plain)
    assert any(not torch.allclose(plain[name], noisy[name]) for name in plain)
