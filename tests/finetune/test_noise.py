"""Noise is normal, follows from the secret and from what it is for, and not from a seed that can be tried out."""

from __future__ import annotations

import math

import pytest
import torch

from splitlm.finetune.noise import gaussian

SECRET = bytes(range(32))


def test_it_is_normal() -> None:
    drawn = gaussian(SECRET, (1, 2), (400, 501)).double().flatten()
    assert drawn.dtype == torch.float64 and drawn.shape == (200_400,)
    sigma = 1 / math.sqrt(len(drawn))
    assert abs(float(drawn.mean())) < 5 * sigma and abs(float(drawn.var()) - 1) < 5 * math.sqrt(2) * sigma
    for bound in (0.5, 1.0, 2.0, 3.0):
        share = float((drawn.abs() < bound).double().mean())
        assert share == pytest.approx(math.erf(bound / math.sqrt(2)), abs=0.006)
    assert float(drawn.max()) > 3.9 and float(drawn.min()) < -3.9 and torch.isfinite(drawn).all()
    halves = drawn.view(2, -1)  # the cosines and the sines
    assert abs(float((halves[0] * halves[1]).mean())) < 5 * sigma * math.sqrt(2)


def test_the_same_comes_for_the_same_alone() -> None:
    first = gaussian(SECRET, (1, 2, 3, True), (4, 8))
    assert torch.equal(first, gaussian(SECRET, (1, 2, 3, True), (4, 8)))
    others = [
        gaussian(SECRET, what, (4, 8)) for what in ((1, 2, 3, False), (1, 23, True), (12, 3, True), (1, 2, 4, True))
    ]
    others.append(gaussian(SECRET[:-1] + b"x", (1, 2, 3, True), (4, 8)))
    assert not any(torch.isclose(first, other).all() for other in others)


def test_all_of_the_secret_counts() -> None:
    """torch's generator takes 32 bits of a seed."""
    for at in (0, 7, 15, 31):
        other = bytearray(SECRET)
        other[at] ^= 0x80
        assert not torch.equal(gaussian(SECRET, (), (8,)), gaussian(bytes(other), (), (8,)))


@pytest.mark.parametrize("shape", [(0, 4), (1,), (3, 5, 7)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    assert gaussian(SECRET, (), shape).shape == shape
