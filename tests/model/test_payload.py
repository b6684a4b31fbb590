"""Tensors become bytes and come back; nothing is copied that need not be."""

from __future__ import annotations

import warnings
from typing import get_args

import pytest
import torch

from splitlm.core.errors import ProtocolError
from splitlm.model import payload
from splitlm.wire.frame import DType, Spec

DTYPES = [getattr(torch, name) for name in get_args(DType)]


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()).view(shape) % 7 - 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (1,), (0,), (4, 0, 2), (1, 1, 5)], ids=str)
def test_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = sample(dtype, *shape)
    spec, data = payload.dump(tensor)
    assert (spec.dtype, spec.shape) == (payload.dtype_name(dtype), shape)
    assert data.nbytes == spec.nbytes == tensor.nbytes
    back = payload.load(spec, memoryview(bytearray(data)))
    assert back.dtype == dtype and back.shape == tensor.shape and torch.equal(back, tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_bit_survives(dtype: torch.dtype) -> None:
    special = torch.tensor([-0.0, float("inf"), float("-inf"), float("nan"), 1e-40, 65504.0]).to(dtype)
    spec, data = payload.dump(special)
    back = payload.load(spec, memoryview(bytearray(data)))
    width = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(back.view(width), special.view(width))


@pytest.mark.parametrize(
    "tensor",
    [sample(torch.float32, 4, 6).t(), sample(torch.float32, 4, 6)[:, ::2], sample(torch.float32, 1, 3).expand(4, 3)],
    ids=["transposed", "strided", "expanded"],
)
def test_memory_in_another_order_is_put_in_order(tensor: torch.Tensor) -> None:
    spec, data = payload.dump(tensor)
    assert torch.equal(payload.load(spec, memoryview(bytearray(data))), tensor)


def test_dump_shares_memory_when_it_can() -> None:
    tensor = torch.zeros(3)
    _, data = payload.dump(tensor)
    tensor[1] = 1.0
    assert bytes(data[4:8]) == b"\x00\x00\x80\x3f"


def test_load_shares_memory_with_the_buffer() -> None:
    buffer = bytearray(8)
    tensor = payload.load(Spec("float32", (2,)), memoryview(buffer))
    buffer[4:] = b"\x00\x00\x80\x3f"
    assert tensor.tolist() == [0.0, 1.0]


def test_a_read_only_buffer_is_copied_and_torch_does_not_complain() -> None:
    data = bytes(4) + b"\x00\x00\x80\x3f"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = payload.load(Spec("float32", (2,)), memoryview(data))
    tensor[0] = 5.0
    assert data[:4] == bytes(4)


def test_a_part_of_a_buffer_at_an_odd_address() -> None:
    buffer = bytearray(9)
    buffer[5:] = b"\x00\x00\x80\x3f"
    assert payload.load(Spec("float32", (2,)), memoryview(buffer)[1:]).tolist() == [0.0, 1.0]


def test_a_tensor_that_needs_its_graph_is_sent_without_it() -> None:
    spec, data = payload.dump(torch.ones(2, requires_grad=True))
    assert not payload.load(spec, memoryview(bytearray(data))).requires_grad


def test_other_numbers_of_bytes_are_refused() -> None:
    for n in (0, 7, 9):
        with pytest.raises(ProtocolError, match=f"{n} bytes came.*8 bytes"):
            payload.load(Spec("float32", (2,)), memoryview(bytearray(n)))


def test_types_that_frames_do_not_know_are_refused() -> None:
    for dtype in (torch.complex64, torch.float64):
        if dtype not in DTYPES:
            with pytest.raises(ProtocolError, match=str(dtype)):
                payload.dump(torch.zeros(1, dtype=dtype))
