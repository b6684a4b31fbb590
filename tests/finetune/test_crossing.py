"""What crosses a party's border: noise where it must be, the same in a repeated attempt, and nothing else changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from splitlm.core.errors import UsageError
from splitlm.finetune.crossing import Crossing
from splitlm.finetune.window import Out
from splitlm.model import device, payload
from splitlm.wire.frame import Backward, Forward
from splitlm.wire.pool import allocate_heap

HIDDEN = 3.0 * torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
MASK = torch.ones(4, 64, dtype=torch.uint8)


def forward(index: int = 0, window: int = 5, train: bool = True) -> Out:
    header = Forward(round=1, window=window, owner=0, index=index, part=1, weight=4, train=train)
    return Out("activation", "worker", 0, header, (HIDDEN, MASK))


def noise(crossing: Crossing, out: Out, window: int = 2) -> torch.Tensor:
    sent = crossing.leave(out, window)
    assert sent.header is out.header and sent.tensors[1] is MASK
    return sent.tensors[0] - HIDDEN


def test_activations_that_leave_an_owner_carry_noise_in_their_own_std() -> None:
    made = noise(Crossing("owner", noise=0.5, secret=b"7"), forward())
    assert made.dtype == torch.float64
    assert float(made.std()) == pytest.approx(0.5 * float(HIDDEN.std()), rel=0.05)
    assert abs(float(made.mean())) < 0.1


def test_a_repeated_attempt_sends_the_same_noise_and_anything_else_another() -> None:
    crossing = Crossing("owner", noise=0.5, secret=b"7")
    first = noise(crossing, forward())
    again = noise(crossing, forward(window=6))  # another attempt at the same window
    assert torch.equal(first, again)
    others = [noise(crossing, forward(index=1)), noise(crossing, forward(), window=3)]
    others += [noise(crossing, forward(train=False)), noise(Crossing("owner", noise=0.5, secret=b"8"), forward())]
    assert all(not torch.allclose(first, other) for other in others)
    assert not torch.allclose(*(noise(Crossing("owner", noise=0.5), forward()) for _ in range(2)))  # secrets differ


def test_nothing_else_is_changed() -> None:
    """Gradients, what a worker sends, and everything where there is no noise."""
    back = Out("gradient", "worker", 0, Backward(round=1, window=5, owner=0, index=0, part=1), (HIDDEN,))
    assert Crossing("owner", noise=0.5).leave(back, 2) is back
    for crossing in (Crossing("worker", noise=0.5), Crossing("owner")):
        out = forward()
        assert crossing.leave(out, 2) is out
    copies = Crossing("owner").copies
    assert (copies.to_device, copies.from_device) == (0.0, 0.0)


def test_what_is_taken_is_not_the_frames_memory() -> None:
    spec, view = payload.dump(HIDDEN.clone())
    took = Crossing("worker").take(spec, view)
    view[:8] = bytes(8)
    assert torch.equal(took, HIDDEN)


@pytest.mark.parametrize("name", ["gpu", "cpu:0", "cuda:", "cuda:x", "", "CUDA"])
def test_a_device_that_no_word_means(name: str) -> None:
    with pytest.raises(UsageError, match="cpu, cuda or cuda:N"):
        device.find_device(name)


def test_without_cuda_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.find_device("cpu").type == "cpu"
    for name in ("cuda", "cuda:1"):
        with pytest.raises(UsageError, match="no CUDA device"):
            device.find_device(name)


def test_a_card_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device.find_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(UsageError, match=r"no cuda:2.*cuda:0 to cuda:1"):
        device.find_device("cuda:2")


def test_pages_are_locked_as_the_setting_says(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)

    def chosen(choice: Any, at: torch.device) -> Any:
        return device.receive_memory(choice, at, allocate_heap)

    assert chosen("auto", cpu) is allocate_heap and chosen("off", cuda) is allocate_heap
    assert not caplog.records  # there is nothing to fall back from without a card
    with pytest.raises(UsageError, match=r"pinned-memory.*computes on the CPU"):
        chosen("on", cpu)
    monkeypatch.setattr(device, "_pinned", lambda n: memoryview(bytearray(n)))
    assert chosen("auto", cuda) is device._pinned and chosen("on", cuda) is device._pinned
    tried: list[int] = []

    def refuse(nbytes: int) -> memoryview:
        tried.append(nbytes)
        raise RuntimeError("cannot lock pages")

    monkeypatch.setattr(device, "_pinned", refuse)
    assert chosen("auto", cuda) is allocate_heap and len(tried) == 1
    assert "cannot lock pages" in caplog.text
    with pytest.raises(UsageError, match="cannot lock pages"):
        chosen("on", cuda)
