"""What a frame costs without a socket: encoding, decoding, and the checksum's share."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from typing import Any

from splitlm.bench.linkecho import hidden
from splitlm.telemetry.summary import percentile
from splitlm.wire.decoder import Decoder
from splitlm.wire.frame import encode
from splitlm.wire.pool import BufferPool


class FrameWork:
    """Times encode, decode and CRC of frames of one size."""

    def __init__(self) -> None:
        self._decoder = Decoder(BufferPool(), "bench", greeting=False)
        self.told: dict[str, Any] = {}

    def run(self, *, size: int, count: int = 200) -> dict[str, Any]:
        """Median milliseconds of each."""
        header, data = hidden(size), bytes(size)
        wire = memoryview(b"".join(encode(header, (data,))))
        return {
            "encode": _median(lambda: encode(header, (data,)), count),
            "decode": _median(lambda: self._decode(wire), count),
            "crc": _median(lambda: zlib.crc32(data), count),
        }

    def _decode(self, wire: memoryview) -> None:
        at = 0
        while at < len(wire):
            room = self._decoder.get_buffer(len(wire) - at)
            part = wire[at : at + len(room)]
            room[: len(part)] = part
            self._decoder.received(len(part))
            at += len(part)
            while (frame := self._decoder.next_frame()) is not None:
                frame.release()

    def close(self) -> None:
        """Nothing to do."""
        self._decoder.close()


def _median(work: Callable[[], object], count: int) -> float:
    times = []
    for _ in range(count):
        begin = time.perf_counter_ns()
        work()
        times.append((time.perf_counter_ns() - begin) / 1e6)
    return percentile(times, 50)
