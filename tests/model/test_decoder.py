"""The compiled steps between products compute what torch does, to float32's rounding, and rows do not touch each other.

They are compiled for this processor's best instructions and for the fewest.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.activations import ACT2FN

from splitlm.core.errors import ProtocolError, UsageError
from splitlm.model.cache import GROWTH_ROWS, BlockKV
from splitlm.model.compute.attention import rotate
from splitlm.model.compute.compiled import RowAttention
from splitlm.model.compute.native.build import build, this_compiler
from splitlm.model.compute.native.decoder import ACTS, Decoder, act_of

pytestmark = pytest.mark.skipif(this_compiler() is None, reason="this machine has no C++ compiler")
WIDTHS = [1, 5, 8, 17, 64, 576]
CLOSE = 2e-6
"""As a share of the largest number."""


@pytest.fixture(scope="module", params=["best", "fewest"])
def steps(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    flags = ["-march=x86-64"] if platform.machine() == "x86_64" else ["-O2"]
    folder = tmp_path_factory.mktemp("native") / "n"
    return Decoder(build(folder, flags=flags if request.param == "fewest" else []))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def near(found: torch.Tensor, true: torch.Tensor) -> bool:
    return bool((found.double() - true).abs().max() <= CLOSE * max(1.0, float(true.abs().max())))


@pytest.mark.parametrize("width", WIDTHS)
def test_norm(steps: Decoder, width: int) -> None:
    x, weight = 100 * drawn(1, 5, width), drawn(2, width)
    found = steps.norm(x, weight, 1e-3 * width)
    true = x.double() / (x.double().square().sum(-1, True) + 1e-3 * width).sqrt() * weight
    assert near(found, true)
    assert all(torch.equal(steps.norm(x[i : i + 1], weight, 1e-3 * width)[0], found[i]) for i in range(5))
    assert torch.equal(steps.norm(x.t().contiguous().t(), weight, 1e-3 * width), found)
    assert torch.equal(steps.norm(torch.zeros(2, width), weight, 1e-3), torch.zeros(2, width))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("act", range(len(ACTS)))
def test_activations(steps: Decoder, act: int, width: int) -> None:
    x = 4 * drawn(1, 3, 2 * width)
    gate, up = x.double().chunk(2, -1)
    assert near(steps.activate(x, act, gated=True), ACTS[act](gate) * up)
    assert near(steps.activate(x, act, gated=False), ACTS[act](x.double()))
    assert torch.equal(steps.activate(x[1:2], act, gated=True)[0], steps.activate(x, act, gated=True)[1])


@pytest.mark.parametrize("act", range(len(ACTS)))
def test_activations_of_extreme_numbers(steps: Decoder, act: int) -> None:
    x = torch.tensor([[-3e38, -1e4, -100.0, -88.0, -20.0, 0.0, 20.0, 88.0, 100.0, 1e4]])
    found, true = steps.activate(x, act, gated=False), ACTS[act](x.double())
    assert found.isfinite().all() and ((found - true).abs() <= CLOSE * true.abs().clamp_min(1)).all()
    found = steps.activate(torch.tensor([[math.nan, 1.0, math.inf]]), act, gated=False)[0]
    assert found[0].isnan() and found[1].isfinite() and not found[2].isfinite()


def test_the_activations_of_transformers_are_known_by_what_they_compute() -> None:
    assert act_of(ACT2FN["silu"]) == 0
    assert [act_of(ACT2FN[name]) for name in ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")] == [1, 1, 1]
    assert [act_of(ACT2FN[name]) for name in ("gelu", "relu", "quick_gelu", "tanh", "mish")] == [None] * 5


class Case:
    """A made-up block's attention, a session's rows so far, and what float64 says of one row more."""

    def __init__(self, heads: int, kv_heads: int, width: int, *, normed: bool, turned: bool) -> None:
        norms = [SimpleNamespace(weight=1 + drawn(seed, width), least=1e-6 * width) for seed in (7, 8)]
        q_norm, k_norm = norms if normed else (None, None)
        self.block = SimpleNamespace(
            heads=heads, kv_heads=kv_heads, head_dim=width, q_norm=q_norm, k_norm=k_norm, scale=width**-0.5
        )
        self.shape = (kv_heads, width)
        angles = drawn(9, 3, 1, width // 2 or 1).double().repeat(1, 1, 2)[..., :width]
        sign = torch.cat([-torch.ones(width // 2), torch.ones(width - width // 2)]).double()
        self.turn = (angles.cos().float(), (angles.sin() * sign).float()) if turned else None

    def true(self, row: torch.Tensor, i: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Of a row alone, ``[all heads, width]``, over the keys and values before it."""
        b = self.block
        q, k, v = row.double().split([b.heads, b.kv_heads, b.kv_heads])
        if b.q_norm is not None:
            q, k = (
                x / (x.square().sum(-1, True) + norm.least).sqrt() * norm.weight
                for x, norm in ((q, b.q_norm), (k, b.k_norm))
            )
        if self.turn is not None:
            q, k = (rotate(x, self.turn[0][i].double(), self.turn[1][i].double()) for x in (q, k))
        keys, values = torch.cat([keys.double(), k[None]]), torch.cat([values.double(), v[None]])
        group = b.heads // b.kv_heads
        scores = torch.einsum("hd,jhd->hj", q, keys.repeat_interleave(group, 1)) * b.scale
        return torch.einsum("hj,jhd->hd", scores.softmax(-1), values.repeat_interleave(group, 1)).reshape(-1)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 4, 8), (9, 3, 64), (6, 1, 20), (4, 2, 80), (2, 2, 34)])
def test_attention(
    steps: Decoder, heads: int, kv_heads: int, width: int, turned: bool, normed: bool, window: int | None
) -> None:
    """Rows one after the other, through a buffer that grows, each the middle one of three."""
    case = Case(heads, kv_heads, width, normed=normed, turned=turned)
    attend, kv, plain = RowAttention(steps, case.block), BlockKV(window), BlockKV(window)
    for begin in range(GROWTH_ROWS + 5):
        rows = drawn(begin, 3, heads + 2 * kv_heads, width)
        kept = plain.take(0, 10**9)[:2] if plain.rows else (torch.empty(0, *case.shape),) * 2
        out = torch.full((3, heads * width), 7.0)
        attend(rows.view(3, -1), 1, case.turn, kv, out)
        assert near(out[1], case.true(rows[1], 1, *kept)) and (out[[0, 2]] == 7).all()
        new = kv.take(kv.seen - 1, 1) if kv.rows else None
        if new is not None:
            plain.append(new[0], new[1])
        assert (plain.seen, plain.rows) == (kv.seen, kv.rows)
        for ours, theirs in zip(kv.take(0, 10**9)[:2], plain.take(0, 10**9)[:2], strict=True):
            assert torch.equal(ours, theirs)


def test_threads_and_places_change_no_bit(steps: Decoder, two_threads: None) -> None:
    case = Case(8, 2, 64, normed=True, turned=True)
    long = drawn(1, 3000, 2, 64), drawn(2, 3000, 2, 64)
    rows = drawn(3, 3, 12 * 64)

    def found(threads: int, row: int) -> torch.Tensor:
        torch.set_num_threads(threads)
        kv, out = BlockKV(), torch.empty(3, 8 * 64)
        kv.append(*long)
        RowAttention(steps, case.block)(rows[[1, 1, 1]], row, tuple(t[[1, 1, 1]] for t in case.turn or ()), kv, out)
        return out[row]

    true = found(1, 0)
    assert near(true, case.true(rows[1].view(12, 64), 1, *long))
    assert all(torch.equal(found(threads, row), true) for threads in (1, 2) for row in range(3))


def test_numbers_that_are_not_finite_stay_so(steps: Decoder) -> None:
    case = Case(2, 1, 16, normed=False, turned=False)
    for place, hurt in ((0, [0]), (17, [1]), (32, [0, 1]), (48, [0, 1])):  # a query head, the other, the key, the value
        row, kv, out = drawn(1, 1, 64), BlockKV(), torch.empty(1, 32)
        kv.append(drawn(2, 40, 1, 16), drawn(3, 40, 1, 16))
        row[0, place] = math.nan
        RowAttention(steps, case.block)(row, 0, None, kv, out)
        assert [bool(part.isnan().any()) for part in out.view(2, 16)] == [head in hurt for head in range(2)]


@pytest.mark.parametrize("given", [((1, 16), torch.bfloat16), ((2, 16), torch.float32), ((1, 8), torch.float32)])
def test_a_row_that_does_not_fit_those_before_it_is_refused(given: tuple[tuple[int, int], torch.dtype]) -> None:
    kv = BlockKV()
    kv.place((1, 16), torch.float32)
    with pytest.raises(ProtocolError, match="KV row"):
        kv.place(*given)
    assert kv.seen == 1


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_bytes(b"\x7fELF")
    with pytest.raises(UsageError, match="cannot be loaded"):
        Decoder(tmp_path / "x.so")


def test_memory_that_is_not_there(steps: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    case, kv = Case(2, 1, 16, normed=False, turned=False), BlockKV()
    full: Any = lambda *_: 1  # noqa: E731
    monkeypatch.setattr(steps, "_attend", full)
    with pytest.raises(MemoryError):
        RowAttention(steps, case.block)(drawn(1, 1, 64), 0, None, kv, torch.empty(1, 32))
