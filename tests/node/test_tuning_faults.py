"""What links and the bus repeat or reorder changes no bit of a run; nothing is computed twice, no graph is left."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from splitlm.bus.base import Event
from splitlm.bus.memory import MemoryHub
from splitlm.core import messages
from splitlm.finetune.plane import Plane
from splitlm.model.tuned import TunedPart
from splitlm.wire.frame import Backward, Forward, Frame
from tests.node import test_tuning
from tests.node.test_tuning import TWO_STAGE, Run, config, model_folder, rows_file, run

BUSY = {
    "u-shape": {
        "microbatches-per-window": 6,
        "max-inflight": 4,
        "timeout-seconds": 30,
        "adaptive-weights": False,
    }
}
"""Several frames of one link are under way, and turns do not depend on clocks."""
PATIENCE_S = (0.02, 0.1, 0.5)
"""How long a frame is held back for another one to overtake it: longer where none came in time."""


class Unruly:
    """A link that hands over its frames twice, early or late, and again when they are long over."""

    def __init__(self, inner: Any, draw: random.Random, reorder: bool, counts: Counter[str], patience_s: float) -> None:
        self._inner, self._draw, self._reorder, self._counts = inner, draw, reorder, counts
        self._patience_s = patience_s
        self._again: list[Frame] = []
        self._old: list[Frame] = []
        self._task: asyncio.Task[Frame] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def receive(self) -> Frame:
        if self._again and self._draw.random() < 0.7:
            self._counts["repeated"] += 1
            return self._again.pop()
        if self._old and self._draw.random() < 0.2:
            self._counts["repeated late"] += 1
            return copied(self._draw.choice(self._old))
        first = await self._next()
        if self._reorder and self._draw.random() < 0.5 and (second := await self._soon()) is not None:
            self._counts["overtaken"] += 1
            self._again.append(copied(first))
            first.release()
            first = second
        self._again.append(copied(first))
        self._old.append(copied(first))
        return first

    def _ask(self) -> asyncio.Task[Frame]:
        if self._task is None:
            self._task = asyncio.create_task(self._inner.receive())
        return self._task

    async def _next(self) -> Frame:
        if self._again:  # what was overtaken must not wait for ever
            await asyncio.wait({self._ask()}, timeout=self._patience_s)
            if not self._ask().done():
                return self._again.pop(0)
        try:
            return await asyncio.shield(self._ask())
        finally:
            if self._task is not None and self._task.done():
                self._task = None

    async def _soon(self) -> Frame | None:
        await asyncio.wait({self._ask()}, timeout=self._patience_s)
        if not self._ask().done() or self._ask().exception() is not None:
            return None
        frame = self._ask().result()
        self._task = None
        return frame

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._inner.close()


def copied(frame: Frame) -> Frame:
    return Frame(frame.header, [memoryview(bytearray(t)) for t in frame.tensors], frame.nbytes)


class Echo(MemoryHub):
    """A bus that delivers everything twice, and now and then something old again."""

    draw = random.Random(5)
    repeated: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self._said: list[tuple[str, messages.Message]] = []
        self._heard: list[tuple[str, Event]] = []

    async def send(self, peer: str, message: messages.Message) -> None:
        for _ in range(2):
            await super().send(peer, message)
        if isinstance(message, messages.Stop):
            return
        self.repeated[type(message).__name__] += 1
        self._said.append((peer, message))
        old = [said for who, said in self._said if who == peer]
        await super().send(peer, self.draw.choice(old))

    def tell(self, peer: str, event: Event) -> None:
        super().tell(peer, event)
        if isinstance(event, messages.Message):
            super().tell(peer, event)
            self.repeated[type(event).__name__] += 1
            self._heard.append((peer, event))
            super().tell(peer, self.draw.choice([e for who, e in self._heard if who == peer]))


def same(a: Run, b: Run) -> None:
    for role, tensors in a.averages.items():
        assert tensors.keys() == b.averages[role].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, b.averages[role][name]), name
    # Clocks and costs differ; sums do not.
    kept = ("round", "window", "windows", "party", "loss", "items", "samples", "repeated")
    rows = [
        [(kind, *(row.get(key) for key in kept)) for kind, row in of.records if kind in ("window", "round")]
        for of in (a, b)
    ]
    assert sorted(rows[0], key=repr) == sorted(rows[1], key=repr)


@pytest.mark.parametrize(
    ("family", "clients", "more", "reorder"),
    [
        ("bert", [2, 2], {"learning": BUSY}, True),
        ("gpt2", [1, 2], {"learning": {"body-sync": "window", **BUSY}}, True),
        ("gpt2", [1, 1], TWO_STAGE | {"learning": {"control-count": 4}}, False),
    ],
)
def test_repeated_and_reordered_frames_change_nothing(
    family: str, clients: list[int], more: dict[str, Any], reorder: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    """Where the last stage steps after each microbatch, their order is the result, so there they are only repeated."""
    folder = model_folder(family, tmp_path / "model", 0.2)
    data = rows_file(tmp_path, "classify" if family == "bert" else "text")
    made = config(folder, data, **{**more, "server": {**more.get("server", {}), "clients": clients}})
    calm = run(made, dtype="float32")
    draw, counts, attach = random.Random(3), Counter[str](), Plane.attach
    for patience_s in PATIENCE_S:

        def unruly(self: Plane, who: Any, lane: Any, channel: Any, patience_s: float = patience_s) -> None:
            attach(self, who, lane, Unruly(channel, draw, reorder, counts, patience_s))

        monkeypatch.setattr(Plane, "attach", unruly)
        same(run(made, dtype="float32"), calm)
        if counts["overtaken"] > 3 or not reorder:
            break
    assert counts["repeated"] > 20 and counts["repeated late"] > 5
    assert counts["overtaken"] > 3 or not reorder


@pytest.mark.parametrize(
    ("clients", "more"),
    [([2, 2], {"learning": BUSY}), ([1, 1], TWO_STAGE | {"learning": {"control-count": 4}})],
    ids=["u-shape", "two-stage"],
)
def test_repeated_messages_change_nothing(
    clients: list[int], more: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    folder = model_folder("bert", tmp_path / "model", 0.2)
    data = rows_file(tmp_path, "classify")
    made = config(folder, data, **{**more, "server": {**more.get("server", {}), "clients": clients}})
    calm = run(made, dtype="float32")
    repeated = Counter[str]()
    monkeypatch.setattr(Echo, "repeated", repeated)
    monkeypatch.setattr(test_tuning, "MemoryHub", Echo)
    same(run(made, dtype="float32"), calm)
    wanted = {"Register", "Start", "Loaded", "Peers", "Linked", "Round", "Notify", "Gather", "Saved", "Stepped"}
    if made.shape.agreed:
        wanted |= {"Window", "Plan", "Opened", "Prepared", "Commit", "Done", "Over"}
    assert wanted <= repeated.keys()


def test_nothing_is_computed_twice_and_no_graph_is_left(tmp_path: Path, monkeypatch: Any) -> None:
    """Graphs are within the credit: of an owner over all workers, and of a worker over all owners."""
    folder, data = model_folder("bert", tmp_path / "model", 0.2), rows_file(tmp_path, "classify")
    inflight = {"max-inflight": 3, "worker-max-inflight": 4, "microbatches-per-window": 7, "timeout-seconds": 30}
    made = config(folder, data, server={"clients": [2, 2]}, learning={"batch-size": 1, "u-shape": inflight})
    calls, ran, most = Counter[str](), Counter[int](), Counter[int]()
    parts: dict[int, TunedPart] = {}
    graphs: list[weakref.ref[torch.Tensor]] = []
    forward, score, backward, init = TunedPart.forward, TunedPart.score, TunedPart.backward, TunedPart.__init__

    def watched_init(self: TunedPart, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        parts[id(self)] = self
        first = next(iter(self._base.encoder.layer), None)
        if first is not None:
            first.register_forward_hook(lambda *_: ran.update([id(self)]))

    def watched(name: str, inner: Any) -> Any:
        def call(self: TunedPart, key: Any, *args: Any, **more: Any) -> Any:
            calls[name] += 1
            result = inner(self, key, *args, **more)
            if key in self._graphs:
                graphs.append(weakref.ref(self._graphs[key][1]))
            most[id(self)] = max(most[id(self)], self.live)
            return result

        return call

    monkeypatch.setattr(TunedPart, "__init__", watched_init)
    monkeypatch.setattr(TunedPart, "forward", watched("forward", forward))
    monkeypatch.setattr(TunedPart, "score", watched("score", score))
    monkeypatch.setattr(TunedPart, "backward", watched("backward", backward))
    done = run(made)
    batches = sum(row["samples"] for what, row in done.records if what == "round")  # of one row each
    assert batches == 80
    assert calls == {"forward": 2 * batches, "score": batches, "backward": 3 * batches}
    held = {part: self.segment for part, self in parts.items()}
    for embed, head in ((True, False), (False, False), (False, True)):
        mine = [part for part, segment in held.items() if (segment.embed, segment.head) == (embed, head)]
        assert sum(ran[part] for part in mine) == batches
    gc.collect()
    assert len(graphs) == 3 * batches
    assert not [ref for ref in graphs if ref() is not None]
    for part, segment in held.items():
        assert parts[part].live == 0
        if segment.embed:
            assert 1 < most[part] <= 3  # max-inflight, though the workers together would take 4
        elif not segment.head:
            assert 1 < most[part] <= 4  # worker-max-inflight


def test_frames_say_what_they_are(tmp_path: Path, monkeypatch: Any) -> None:
    """Two frames of each way for every microbatch of a u-shape, and no other."""
    folder, data = model_folder("bert", tmp_path / "model", 0.0), rows_file(tmp_path, "classify")
    made = config(folder, data, server={"global-round": 1})
    sent, send = Counter[tuple[str, int]](), Plane.send

    async def watched(self: Plane, who: Any, out: Any) -> None:
        assert isinstance(out.header, Forward | Backward)
        sent[type(out.header).__name__, out.header.part] += 1
        assert len(out.tensors) == (2 if isinstance(out.header, Forward) else 1)
        await send(self, who, out)

    monkeypatch.setattr(Plane, "send", watched)
    run(made)
    assert sent == {("Forward", 1): 14, ("Forward", 2): 14, ("Backward", 1): 14, ("Backward", 0): 14}
