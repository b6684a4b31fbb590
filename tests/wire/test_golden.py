"""One frame of each kind as bytes, shared with other languages. Written by ``python tests/wire/test_golden.py``."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from splitlm.core.sampling import Sampling
from splitlm.wire import frame
from splitlm.wire.decoder import Decoder
from splitlm.wire.frame import Header, Spec, encode
from splitlm.wire.pool import BufferPool

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "frames"

FRAMES: dict[str, tuple[Header, list[bytes]]] = {
    "hello": (frame.Hello("data", bytes(range(32))), []),
    "challenge": (frame.Challenge(bytes(range(32, 64)), bytes(range(64, 96))), []),
    "answer": (frame.Answer(bytes(range(96, 128)), b'{"node":"stage 1","version":"1.0","protocol":2}'), []),
    "welcome": (frame.Welcome(bytes(range(128, 160)), b'{"node":"head","version":"1.0","protocol":2}'), []),
    "refused": (frame.Refused("The dtype differs: a has 'float32', b has 'bfloat16' (claim 'dtype')"), []),
    "said": (frame.Said(b'{"kind":"ping"}'), []),
    "open": (
        frame.Open(
            7,
            2048,
            Sampling(temperature=0.5, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.1, seed=2**40),
            logits=True,
            tensors=(Spec("int64", (3,)),),
        ),
        [struct.pack("<3q", 1, -2, 300)],
    ),
    "hidden": (
        frame.Hidden(7, 3, 12, sample=True, tensors=(Spec("float32", (1, 2, 16)), Spec("uint8", (5,)))),
        [struct.pack("<32f", *(i / 4 for i in range(32))), b"tail!"],
    ),
    "token": (frame.Token(7, 3, 14, 31999, tensors=(Spec("float32", (2,)),)), [struct.pack("<2f", 0.25, -1e30)]),
    "close": (frame.Close(7), []),
    "fence": (frame.Fence(5), []),
    "failed": (frame.Failed(7, 4, "node 2 (block 4 + head): Session 7: the logits hold a nan."), []),
    "rows": (
        frame.Rows(2, 7, 11, 40, tensors=(Spec("float32", (1, 2, 2)), Spec("float32", (1, 2, 2)))),
        [struct.pack("<4f", 1, 2, 3, 4), struct.pack("<4f", 5, 6, 7, 8)],
    ),
    "mark": (frame.Mark(2, 9, ((7, 41), (8, 3))), []),
    "forward": (
        frame.Forward(1, 12, 0, 3, 1, 17, tensors=(Spec("float64", (1, 2, 2)), Spec("uint8", (1, 2)))),
        [struct.pack("<4d", 1, -2, 0.5, 3), b"\x01\x00"],
    ),
    "backward": (
        frame.Backward(1, 12, 0, 3, 0, tensors=(Spec("bfloat16", (1, 1, 2)),)),
        [bytes([0x80, 0x3F, 0, 0xC0])],
    ),
    "scored": (frame.Scored(1, 12, 0, 3, 2.5, 4, 3.0, 4), []),
    "piece": (
        frame.Piece("update", 1, 0, "model.norm.weight", Spec("float32", (3,)), 4, tensors=(Spec("uint8", (4,)),)),
        [struct.pack("<f", 0.25)],
    ),
    "whole": (frame.Whole("gradient", 1, 12, 40, 2, bytes(range(32))), []),
}


def golden(name: str) -> bytes:
    """What this version encodes."""
    header, tensors = FRAMES[name]
    return b"".join(encode(header, tensors))


def test_every_kind_of_frame_has_a_golden_file() -> None:
    kinds = {kind.__name__.lower() for kind in frame.AnyHeader.__args__}
    assert set(FRAMES) == kinds == {path.stem for path in GOLDEN.glob("*.bin")}


@pytest.mark.parametrize("name", FRAMES)
def test_encodes_to_exactly_these_bytes(name: str) -> None:
    assert golden(name) == (GOLDEN / f"{name}.bin").read_bytes()


@pytest.mark.parametrize("name", FRAMES)
def test_decodes_from_exactly_these_bytes(name: str) -> None:
    header, tensors = FRAMES[name]
    data = (GOLDEN / f"{name}.bin").read_bytes()
    [got] = Decoder(BufferPool()).feed(data)
    assert got.header == header
    assert [bytes(t) for t in got.tensors] == tensors
    assert got.nbytes == len(data)


def test_the_prefix_is_where_the_protocol_page_says() -> None:
    """Read by hand, so that encoder and decoder cannot be wrong together."""
    data = (GOLDEN / "hidden.bin").read_bytes()
    assert data[:8] == b"SPLM" + bytes([2, 0, 2, 0])
    head = int.from_bytes(data[8:12], "little")
    assert int.from_bytes(data[16:24], "little") == 128 + 64 == len(data) - 32 - head
    assert data[32 + head :][:8] == struct.pack("<2f", 0.0, 0.25)
    assert data[32 + head + 128 :] == b"tail!" + bytes(59)


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for each in FRAMES:
        (GOLDEN / f"{each}.bin").write_bytes(golden(each))
