"""Gaussian noise that follows from a secret, and that nobody without it can draw again."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

_BITS = 24
"""Of each uniform number: what a float32 holds."""


def gaussian(secret: bytes, what: Sequence[object], shape: Sequence[int]) -> torch.Tensor:
    """Standard normal numbers in float32, by Box and Muller (1958) from the output of SHAKE-256.

    Not by ``torch.Generator``: of its seed the CPU's takes 32 bits, so that all streams there are can be tried. The
    largest number is 5.77.

    Args:
        secret: of who draws it.
        what: that the noise is for. The same noise comes for the same, and independent noise for anything else.
        shape: of the result.
    """
    count = math.prod(shape)
    pairs = (count + 1) // 2
    key = secret + "\0".join(map(str, what)).encode()
    stream = bytearray(hashlib.shake_256(key).digest(8 * pairs))
    if not pairs:
        return torch.zeros(*shape)
    whole = (torch.frombuffer(stream, dtype=torch.int32) >> (32 - _BITS)) & ((1 << _BITS) - 1)
    first, second = (half.to(torch.float32) for half in whole.view(2, pairs))
    radius = torch.sqrt(-2.0 * torch.log((first + 1.0) / (1 << _BITS)))
    angle = second * (2.0 * math.pi / (1 << _BITS))
    return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)])[:count].view(*shape)
