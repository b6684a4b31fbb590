"""The probe: what it measures adds up, on a device and over a link."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from splitlm.core.errors import PeerLostError, ProtocolError, UsageError
from splitlm.core.profile import LinkProfile
from splitlm.link import memory, tcp
from splitlm.link.base import StreamChannel
from splitlm.model.compute.exact import ExactEngine
from splitlm.model.load import ModelFiles
from splitlm.node import probe
from splitlm.wire.frame import PROTOCOL, Close, Hidden, Spec
from splitlm.wire.handshake import Claims, Identity


class Slowed:
    """A device of known times: what a step takes is told, not measured."""

    def __init__(self, block_s: float, head_s: float, embed_s: float, fixed_s: float) -> None:
        self.now = 0.0
        self.block_s, self.head_s, self.embed_s, self.fixed_s = block_s, head_s, embed_s, fixed_s
        self.contexts: set[int] = set()

    def forward(self, engine: ExactEngine, inputs: torch.Tensor, position: int, logits: bool) -> None:
        segment = engine._part.segment
        self.now += self.fixed_s + segment.count * self.block_s
        self.now += self.head_s * (segment.head and logits) + self.embed_s * segment.embed
        self.contexts.add(position)


@pytest.fixture
def slowed(monkeypatch: pytest.MonkeyPatch) -> Slowed:
    """The probe's clock shows what the device is told to take."""
    device = Slowed(block_s=0.003, head_s=0.010, embed_s=0.001, fixed_s=0.0005)
    run = ExactEngine.run

    def told(engine: ExactEngine, jobs: Any) -> Any:
        for job in jobs:
            device.forward(engine, job.inputs, job.position, job.logits)
        return run(engine, jobs)

    monkeypatch.setattr(ExactEngine, "run", told)
    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: device.now))
    return device


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_a_known_device_is_measured_as_it_is(tiny: Callable[[str], Path], slowed: Slowed, family: str) -> None:
    files = ModelFiles(tiny(family))
    model, device = probe.measure_device(files, name="here", model="m", memory_bytes=123, context_tokens=20, repeats=3)
    assert device.block_ms == pytest.approx(3)
    assert device.head_ms == pytest.approx(10)
    assert device.embed_ms == pytest.approx(1)
    assert device.fixed_ms == pytest.approx(0.5)
    assert (device.name, device.memory_bytes, device.context_tokens) == ("here", 123, 20)
    assert device.threads == torch.get_num_threads()
    assert device.measured == model.identity
    assert model.name == "m"
    assert slowed.contexts == {0, 20, 21, 22, 23}


def test_one_slow_moment_does_not_show(tiny: Callable[[str], Path], slowed: Slowed) -> None:
    steps, plain = iter(range(10**6)), slowed.forward

    def stumbling(*args: Any) -> None:
        plain(*args)
        slowed.now += 5.0 if next(steps) == 13 else 0.0

    slowed.forward = stumbling  # type: ignore[method-assign]
    _, device = probe.measure_device(ModelFiles(tiny("llama")), name="here", memory_bytes=1, repeats=5)
    assert device.block_ms == pytest.approx(3)


def test_a_real_device_has_positive_times_and_a_budget(tiny: Callable[[str], Path]) -> None:
    _, device = probe.measure_device(ModelFiles(tiny("llama")), name="here", repeats=3)
    assert device.block_ms > 0
    assert 0 < device.memory_bytes <= probe.free_memory_bytes() * 1.5


@pytest.mark.parametrize("given", [{"repeats": 0}, {"context_tokens": 0}, {"context_tokens": 127}])
def test_what_cannot_be_measured_is_said(tiny: Callable[[str], Path], given: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="--"):
        probe.measure_device(ModelFiles(tiny("llama")), name="here", **given)  # type: ignore[arg-type]


def claims(name: str) -> Claims:
    return Claims(node=name, version="1", protocol=PROTOCOL)


async def _links(kind: str) -> list[tuple[StreamChannel, StreamChannel]]:
    """Two one-way data links between the same two nodes: (dialler, listener) there, and back."""
    made = []
    for a, b in (("here", "there"), ("there", "here")):
        if kind == "memory":
            made.append(memory.pair(claims(a), claims(b)))
            continue
        listener = await tcp.listen("127.0.0.1", 0, Identity(claims(b)), "data")
        dialled = await tcp.connect("127.0.0.1", listener.port, Identity(claims(a)), "data", deadline_s=10, who=b)
        made.append((dialled, await listener.accept()))
        await listener.close()
    return made


def run(kind: str, peer: Callable[[StreamChannel, StreamChannel], Awaitable[None]], **given: Any) -> LinkProfile:
    async def main() -> LinkProfile:
        async with asyncio.timeout(30):
            (out, theirs), (ours, home) = await _links(kind)
            answering = asyncio.ensure_future(peer(theirs, ours))
            try:
                link = await probe.measure_link(out, home, source="here", target="there", **given)
                await answering
                return link
            finally:
                answering.cancel()
                await asyncio.gather(*(c.close() for c in (out, home, theirs, ours)))

    return asyncio.run(main())


@pytest.mark.parametrize("kind", ["memory", "tcp"])
def test_a_link_has_latency_and_rate(kind: str) -> None:
    link = run(kind, probe.echo, repeats=3)
    assert (link.source, link.target) == ("here", "there")
    assert 0 < link.latency_ms < 1000
    assert link.bytes_per_s > 1e5


def test_a_slow_link_is_told_from_a_far_one() -> None:
    """The peer holds back each echo, and large ones longer: 40 ms there and back, and 100 ms per MiB more."""

    async def far(inbound: StreamChannel, outbound: StreamChannel) -> None:
        while True:
            frame = await inbound.receive()
            if isinstance(frame.header, Close):
                frame.release()
                return
            size = sum(view.nbytes for view in frame.tensors)
            await asyncio.sleep(0.04 + 0.1 * size / 2**20)
            await outbound.send(frame.header, frame.tensors)
            frame.release()

    link = run("memory", far, repeats=2)
    assert 20 <= link.latency_ms < 60
    assert 2**20 / 0.2 < link.bytes_per_s < 2**20 / 0.02


def test_a_peer_that_does_not_answer_is_named() -> None:
    async def silent(inbound: StreamChannel, _: StreamChannel) -> None:
        (await inbound.receive()).release()

    begun = time.monotonic()
    with pytest.raises(PeerLostError, match=r"there did not echo within 0\.2 s"):
        run("memory", silent, deadline_s=0.2)
    assert time.monotonic() - begun < 10


def test_a_peer_that_goes_away_is_told() -> None:
    async def leaves(inbound: StreamChannel, outbound: StreamChannel) -> None:
        (await inbound.receive()).release()
        await outbound.close()

    with pytest.raises(PeerLostError):
        run("tcp", leaves)


def test_a_peer_that_answers_with_something_else_is_refused() -> None:
    async def lies(inbound: StreamChannel, outbound: StreamChannel) -> None:
        opened = await inbound.receive()
        await outbound.send(opened.header)
        (await inbound.receive()).release()
        await outbound.send(Hidden(1, 0, 77, False, tensors=(Spec("uint8", (1, 1, 0)),)), [b""])

    with pytest.raises(ProtocolError, match="the echo of"):
        run("memory", lies)
