"""A bare echo: two processes, blocking sockets, no frame. The unit in which hops are told."""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

from splitlm.bench.arm import Arm
from splitlm.core.errors import PeerLostError
from splitlm.telemetry.summary import percentile

ORDER = struct.Struct("<QQ")
"""Bytes of a message, and after how many of them to answer: 1 echoes each, more makes a one-way stream."""


def take(sock: socket.socket, buffer: memoryview) -> None:
    """Fill the buffer.

    Raises:
        PeerLostError: the stream ended before.
    """
    got = 0
    while got < len(buffer):
        count = sock.recv_into(buffer[got:])
        if not count:
            raise PeerLostError("The bench's peer went away")
        got += count


def listening() -> socket.socket:
    """A socket that listens on a free port of this machine."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    return sock


def dial(port: int) -> socket.socket:
    """A connection to a port of this machine, without delay for small messages."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class EchoServer:
    """Answers one connection until it ends."""

    def __init__(self) -> None:
        self._listener = listening()
        self.told: dict[str, Any] = {"port": self._listener.getsockname()[1]}

    def run(self) -> dict[str, Any]:
        """Serve."""
        sock, _ = self._listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = memoryview(bytearray(ORDER.size))
        buffer = memoryview(bytearray(1))
        with sock:
            try:
                while True:
                    take(sock, head)
                    size, count = ORDER.unpack(head)
                    if size > len(buffer):
                        buffer = memoryview(bytearray(size))
                    for _ in range(count):
                        take(sock, buffer[:size])
                    sock.sendall(buffer[:size] if count == 1 else head)
            except (PeerLostError, ConnectionError):
                return {}

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()


class Echo:
    """Sends to a server process of its own."""

    def __init__(self) -> None:
        self._server = Arm("echo-server").ready()
        self._server.ask()
        self._sock = dial(int(self._server.told["port"]))
        self.told: dict[str, Any] = {}

    def run(self, *, size: int, count: int = 300, stream: bool = False, idle_ms: float = 0.0) -> dict[str, Any]:
        """One way's milliseconds: half of a round trip; with ``stream``, of ``count`` messages sent in one go.

        Args:
            size: bytes of a message.
            count: messages.
            idle_ms: sleep before each, as a stage does while others compute.
        """
        message = bytes(size)
        back = memoryview(bytearray(max(size, ORDER.size)))
        if stream:
            begin = time.perf_counter_ns()
            self._sock.sendall(ORDER.pack(size, count))
            for _ in range(count):
                self._sock.sendall(message)
            take(self._sock, back[: ORDER.size if count > 1 else size])
            return {"ms": (time.perf_counter_ns() - begin) / 1e6 / count}
        trips, joined = [], ORDER.pack(size, 1) + message
        for _ in range(count):
            if idle_ms:
                time.sleep(idle_ms / 1e3)
            begin = time.perf_counter_ns()
            self._sock.sendall(joined)
            take(self._sock, back[:size])
            trips.append((time.perf_counter_ns() - begin) / 2e6)
        return {"ms": percentile(trips, 50), "p90": percentile(trips, 90)}

    def close(self) -> None:
        """End both."""
        self._sock.close()
        self._server.close()
