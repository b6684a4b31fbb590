"""The ceiling of a ring: the same stages in as many processes, with blocking sockets and nothing else.

No event loop, no frames, no sessions, no trace, one thread per process. What a ring of ours takes beyond this is ours.
"""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from splitlm.bench.arm import Arm
from splitlm.bench.echo import dial, listening, take
from splitlm.bench.generators import prompt
from splitlm.core.cut import make_cut
from splitlm.core.errors import PeerLostError
from splitlm.model.compute.choice import choose
from splitlm.model.load import ModelFiles
from splitlm.model.stage import Stage, build_stages
from splitlm.telemetry.summary import percentile

HEAD = struct.Struct("<qqqqq")
"""Session, position, rows, end of the sender's compute (ns), sum of the lap's hops so far (ns)."""


def build(model: str, dtype: str, cuts: list[int], node: int, compute: str) -> Stage:
    """The stage of one node."""
    torch.set_num_threads(1)
    files = ModelFiles(Path(model), dtype=dtype)
    (stage,) = build_stages(files, [make_cut(files.blocks, cuts).segments[node]], compute=choose(compute).name)
    return stage


class BareStage:
    """A stage after the head's."""

    def __init__(self, *, model: str, dtype: str, cuts: list[int], node: int, compute: str = "exact") -> None:
        self._stage = build(model, dtype, cuts, node, compute)
        self._listener = listening()
        self.told: dict[str, Any] = {"port": self._listener.getsockname()[1]}

    def run(self, *, port: int) -> dict[str, Any]:
        """Serve until the stage before goes away."""
        outbound = dial(port)
        inbound, _ = self._listener.accept()
        inbound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with inbound, outbound, suppress(PeerLostError, ConnectionError):
            self._serve(inbound, outbound)
        return {}

    def _serve(self, inbound: socket.socket, outbound: socket.socket) -> None:
        stage, last = self._stage, 0
        head = memoryview(bytearray(HEAD.size))
        row = stage.hidden * stage.dtype.itemsize
        while True:
            take(inbound, head)
            session, position, rows, ended, hops = HEAD.unpack(head)
            buffer = bytearray(rows * row)
            take(inbound, memoryview(buffer))
            inputs = torch.frombuffer(buffer, dtype=stage.dtype).view(1, rows, stage.hidden)
            if session != last:
                stage.close(last)
                stage.open(session)
                last = session
            hops += time.monotonic_ns() - ended
            out = stage.forward(session, inputs, position, logits=True)
            if out is None:
                raise RuntimeError("a stage gave nothing")
            if stage.segment.head:
                token = int(out.argmax())
                outbound.sendall(HEAD.pack(session, position, token, time.monotonic_ns(), hops))
            else:
                data = out.contiguous().view(torch.uint8).numpy().data
                outbound.sendall(HEAD.pack(session, position, rows, time.monotonic_ns(), hops) + data.tobytes())

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()


class BareRing:
    """The head of the bare ring; the other stages are its children."""

    def __init__(self, *, model: str, dtype: str, cuts: list[int], compute: str = "exact") -> None:
        given = {"model": model, "dtype": dtype, "cuts": cuts, "compute": compute}
        self._others = [Arm("bare-stage", node=node, **given) for node in range(1, len(cuts) + 1)]
        self._listener = listening()
        self._stage = build(model, dtype, cuts, 0, compute)
        ports = [int(arm.ready().told["port"]) for arm in self._others]
        for arm, port in zip(self._others, [*ports[1:], self._listener.getsockname()[1]], strict=True):
            arm.ask(port=port)
        self._outbound = dial(ports[0])
        self._inbound, _ = self._listener.accept()
        self._session = 0
        self.told: dict[str, Any] = {}

    def run(self, *, tokens: int) -> dict[str, Any]:
        """Generate once; the mean hop of the median lap beside."""
        self._stage.close(self._session)
        self._session += 1
        self._stage.open(self._session)
        ids, position, hops = prompt(), 0, []
        head = memoryview(bytearray(HEAD.size))
        begin = time.perf_counter()
        ended = waited = 0
        for _ in range(tokens):
            inputs = torch.tensor([ids])
            if ended:
                hops.append((waited + time.monotonic_ns() - ended) / 1e6 / (len(self._others) + 1))
            out = self._stage.forward(self._session, inputs, position)
            if out is None:
                raise RuntimeError("a stage gave nothing")
            data = out.contiguous().view(torch.uint8).numpy().data.tobytes()
            self._outbound.sendall(HEAD.pack(self._session, position, len(ids), time.monotonic_ns(), 0) + data)
            position += len(ids)
            take(self._inbound, head)
            _, _, token, ended, waited = HEAD.unpack(head)
            ids = [token]
        return {
            "tokens": tokens,
            "seconds": time.perf_counter() - begin,
            "hop_ms": percentile(hops, 50) if hops else 0.0,
        }

    def close(self) -> None:
        """End the ring: each stage ends when the one before it does."""
        for sock in (self._outbound, self._inbound, self._listener):
            sock.close()
        for arm in self._others:
            arm.close()
