"""The border between a party's links and its device: tensors come in, tensors go out, noise is added to what leaves.

All of it runs on the compute thread. On the CPU nothing is copied but out of the buffers of a frame.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch

from splitlm.core.shape import Role
from splitlm.finetune.batch import Microbatch
from splitlm.finetune.noise import gaussian
from splitlm.finetune.window import Out
from splitlm.model import payload
from splitlm.wire.frame import Forward, Spec

T = TypeVar("T")


@dataclass
class Copies:
    """Seconds that copies took; 0 where a party computes on the CPU.

    Attributes:
        to_device: from memory to the device (H2D).
        from_device: back (D2H).
    """

    to_device: float = 0.0
    from_device: float = 0.0


class Crossing:
    """What a party's tensors pass on their way in and out.

    Args:
        role: of the party.
        device: where it computes.
        noise: standard deviation of the Gaussian noise on activations that leave an owner, in their own.
        secret: of the owner, from which its noise follows; None draws one.

    The noise follows from the owner's secret and the microbatch, so an attempt that is repeated sends the same: from
    two draws of it a listener would average it away. It does not follow from the run, whose settings every party knows
    and could take it off again with. It is no guarantee of privacy: how much of a text noisy activations still tell is
    found by attacking them, and bounded by no proof.

    The secret lives as long as the process and is stored nowhere. A run that is gone on with draws another one: its
    rows may be others by then, and the same noise on two texts is taken off by their difference. What it does again of
    a round that was broken off is therefore a second draw.
    """

    def __init__(
        self, role: Role, device: torch.device | None = None, noise: float = 0.0, secret: bytes | None = None
    ) -> None:
        self.device = device or torch.device("cpu")
        self.copies = Copies()
        self._noise = noise if role == "owner" else 0.0
        self._secret = secrets.token_bytes(32) if secret is None else secret

    def take(self, spec: Spec, view: memoryview) -> torch.Tensor:
        """A tensor of a frame, in memory of its own on the device."""
        return self._timed("to_device", lambda: payload.load(spec, view).to(self.device, copy=True))

    def own(self, batch: Microbatch) -> Microbatch:
        """An owner's microbatch, on the device."""
        if self.device.type == "cpu":
            return batch
        names = ("ids", "mask", "labels")
        moved = self._timed("to_device", lambda: {name: getattr(batch, name).to(self.device) for name in names})
        return replace(batch, **moved)

    def leave(self, out: Out, window: int) -> Out:
        """What is to be sent because of a window of the round, in memory that links read."""
        tensors = out.tensors
        if self._noise and out.lane == "activation" and isinstance(out.header, Forward):
            tensors = (self._noisy(tensors[0], out.header, window), *tensors[1:])
        if self.device.type != "cpu":
            tensors = self._timed("from_device", lambda: tuple(t.cpu() for t in tensors))
        return out if tensors is out.tensors else replace(out, tensors=tensors)

    def _noisy(self, hidden: torch.Tensor, header: Forward, window: int) -> torch.Tensor:
        """Hidden states ``[B, T, hidden]`` with noise. An attempt has a number of its own, a window keeps its."""
        made = gaussian(self._secret, (header.round, window, header.index, header.train), hidden.shape)
        return hidden + (self._noise * hidden.std()) * made.to(hidden.device, hidden.dtype)

    def _timed(self, way: Literal["to_device", "from_device"], copy: Callable[[], T]) -> T:
        if self.device.type == "cpu":
            return copy()
        torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        done = copy()
        torch.cuda.synchronize(self.device)
        setattr(self.copies, way, getattr(self.copies, way) + time.perf_counter() - started)
        return done
