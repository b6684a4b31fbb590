"""The native products compute what their quantisation says, to float32's rounding, and rows do not touch each other.

Every set of instructions that this processor has is compiled and tried.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from splitlm.core.errors import UsageError
from splitlm.model.compute.native.build import build, this_compiler
from splitlm.model.compute.native.library import TILE, Library
from splitlm.model.compute.native.product import BlockProduct, finite
from splitlm.model.compute.products import KINDS

BLOCK, WEIGHT, FINE = 16, 127, 127 * 128
SHAPES = [(1, 1), (15, 31), (16, 32), (17, 33), (33, 70), (48, 96), (100, 257)]
pytestmark = pytest.mark.skipif(this_compiler() is None, reason="this machine has no C++ compiler")


@pytest.fixture(scope="module", params=["best", "avx2", "plain"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    flags = {"best": [], "avx2": ["-DSPLITLM_AVX2"], "plain": ["-DSPLITLM_PLAIN"]}[request.param]
    if request.param == "avx2" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    made = Library(build(tmp_path_factory.mktemp("native") / "n", flags=flags))
    assert request.param in {"best", made.level}
    return made


def quantised(x: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers ``[…, blocks, 32]`` and scales ``[…, blocks]`` of rows, as the source's first paragraphs say."""
    blocks = functional.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1)
    inverse = torch.where(largest < 1e-30, torch.zeros_like(largest), torch.full_like(largest, top) / largest)
    return (blocks * inverse[..., None]).round(), torch.where(largest < 1e-30, 0, largest / top)


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    (a, a_scale), (b, b_scale) = quantised(x, FINE), quantised(weight, WEIGHT)
    sums = torch.einsum("rki,oki->rok", a.double(), b.double())
    out = (sums * (a_scale[:, None].double() * b_scale[None].double())).sum(-1)
    return out if bias is None else out + bias.double()


def drawn(seed: int, *shape: int) -> torch.Tensor:
    """Normal numbers, some rows a thousand times as large as others."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * (10 * torch.rand(shape[0], 1, generator=generator) - 5).exp()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "columns"), SHAPES)
def test_it_is_its_quantisation_and_float32_sums(library: Library, outputs: int, columns: int, biased: bool) -> None:
    weight, x = drawn(1, outputs, columns), drawn(2, 13, columns)
    bias = drawn(3, 1, outputs)[0] if biased else None
    found = library.product(x, library.pack(weight), outputs, bias)
    true = reference(x, weight, bias)
    size = x.abs() @ weight.abs().t() + (0 if bias is None else bias.abs())
    assert ((found.double() - true).abs() <= 2e-6 * size.double()).all()
    assert found.dtype == torch.float32 and found.shape == (13, outputs)


def test_one_that_rounds_otherwise_would_show() -> None:
    """The bound of the test above is far below what a wrong block, scale or rounding changes."""
    weight, x = drawn(1, 33, 70), drawn(2, 13, 70)
    size = (x.abs() @ weight.abs().t()).double()
    off = (reference(x, weight, None) - x.double() @ weight.double().t()).abs() / size
    assert off.mean() > 1e-4


@pytest.mark.parametrize(("outputs", "columns"), [(17, 33), (64, 576)])
def test_rows_do_not_depend_on_each_other(library: Library, outputs: int, columns: int) -> None:
    packed, bias = library.pack(drawn(1, outputs, columns)), drawn(3, 1, outputs)[0]
    x = drawn(2, 32, columns)
    alone = torch.cat([library.product(x[i : i + 1], packed, outputs, bias) for i in range(32)])
    for rows in range(1, 33):
        assert torch.equal(library.product(x[:rows], packed, outputs, bias), alone[:rows])
        assert torch.equal(library.product(x[32 - rows :], packed, outputs, bias), alone[32 - rows :])


def test_threads_change_no_bit(library: Library) -> None:
    if not library.threaded:
        pytest.skip("this compiler has no OpenMP")
    outputs, columns = 500, 640
    packed, x = library.pack(drawn(1, outputs, columns)), drawn(2, 9, columns)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append([library.product(x[:rows], packed, outputs) for rows in (1, 9)])
    finally:
        torch.set_num_threads(before)
    for several in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], several, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_goes_on_as_that_and_stays_in_its_row(library: Library, bad: float) -> None:
    """So that a session fails where its numbers went wrong, and only that session."""
    packed, x = library.pack(drawn(1, 20, 70)), drawn(2, 9, 70)
    true = library.product(x, packed, 20)
    for row, column in ((0, 0), (4, 40), (8, 69)):
        wrong = x.clone()
        wrong[row, column] = bad
        found = library.product(wrong, packed, 20)
        assert not found[row].isfinite().any()
        found[row] = true[row]
        assert torch.equal(found, true)


def test_the_largest_numbers_of_all_signs_are_summed_exactly(library: Library) -> None:
    """Nothing overflows on the way, whatever the signs; and low parts at both ends of theirs are put together."""
    signs = torch.tensor([[1.0], [-1.0]])
    columns = 4 * BLOCK
    weight = torch.full((16, columns), 127.0) * torch.where(torch.arange(16) % 2 == 0, 1.0, -1.0)[:, None]
    x = torch.full((2, columns), 127.0) * signs
    assert torch.equal(library.product(x, library.pack(weight), 16), x @ weight.t())
    turned = x * torch.where(torch.arange(columns) % 3 == 0, -1.0, 1.0)
    assert torch.equal(library.product(turned, library.pack(weight), 16), turned @ weight.t())
    one = torch.zeros(16, BLOCK)
    one[:, 5] = 127.0
    whole = torch.tensor([-FINE, -FINE + 1, -65, -64, -63, -1, 1, 63, 64, 65, 191, 192, 193, FINE - 1, FINE]).float()
    x = torch.zeros(len(whole), BLOCK)
    x[:, 0], x[:, 5] = FINE, whole
    assert torch.equal(library.product(x, library.pack(one), 16)[:, 3], whole * 127)


def test_noughts_and_the_smallest_numbers_are_nought(library: Library) -> None:
    weight, x = drawn(1, 16, 64), torch.zeros(3, 64)
    x[1], x[2, :BLOCK] = 1e-38, 1e-45
    assert torch.equal(library.product(x, library.pack(weight), 16), torch.zeros(3, 16))
    assert torch.equal(library.product(weight, library.pack(torch.zeros(16, 64)), 16), torch.zeros(16, 16))


def test_huge_numbers_have_a_scale(library: Library) -> None:
    weight, x = torch.eye(32), torch.full((1, 32), 3e38)
    assert torch.allclose(library.product(x, library.pack(weight), 32), x, rtol=0.01)


def test_a_matrix_is_packed_in_parts_and_from_any_type(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = drawn(1, 100, 70).bfloat16()
    whole = library.pack(weight.float())
    monkeypatch.setattr("splitlm.model.compute.native.library.PACKED_ROWS", 2 * TILE)
    assert torch.equal(library.pack(weight), whole)
    assert torch.equal(library.pack(weight.t().contiguous().t()), whole), "as GPT-2 stores it"
    x = drawn(2, 6, 140)
    assert torch.equal(library.product(x[:, ::2], whole, 100), library.product(x[:, ::2].contiguous(), whole, 100))


def test_shapes_that_do_not_fit_are_refused(library: Library) -> None:
    packed = library.pack(drawn(1, 16, 64))
    for x, outputs in ((drawn(2, 3, 96), 16), (drawn(2, 3, 64), 17), (drawn(2, 3, 64).double(), 16)):
        with pytest.raises(RuntimeError, match="packed matrix"):
            library.product(x, packed, outputs)
    for bias in (torch.zeros(15), torch.zeros(16).double(), torch.zeros(32)[::2]):
        with pytest.raises(RuntimeError, match="bias"):
            library.product(drawn(2, 3, 64), packed, 16, bias)
    assert library.product(torch.empty(0, 64), packed, 16).shape == (0, 16)


def test_the_engine_takes_it_where_it_works() -> None:
    found = KINDS["int8"].trial()
    assert found.kind is not None and not found.why and found.kind.make is BlockProduct
    assert found.kind.width == 32 and found.kind.name == "int8 (native)"


def test_a_product_counts_and_releases() -> None:
    if why := KINDS["int8"].prepare():
        pytest.skip(why)
    weight = drawn(1, 33, 70)
    product = BlockProduct(weight, torch.ones(33, dtype=torch.bfloat16))
    assert product.nbytes == 3 * 5 * 320 and product.elements == weight.numel()
    assert product(drawn(2, 4, 70)).shape == (4, 33)
    product.release()
    assert product.nbytes == 0
    with pytest.raises(RuntimeError, match="given back"):
        product(drawn(2, 4, 70))


def test_a_matrix_with_an_infinite_number_is_not_packed() -> None:
    weight = drawn(1, 16, 32)
    assert finite(weight) == ""
    weight[3, 4] = math.inf
    assert "not finite" in finite(weight)


def test_packing_starts_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that comes while tokens are made is packed with what is there, or not at all."""
    from splitlm.model.compute.native import library as module

    def no(*_: object, **__: object) -> None:
        raise RuntimeError("a process was started")

    monkeypatch.setattr("subprocess.Popen", no)
    monkeypatch.setattr(module, "folder", lambda: tmp_path / "none")
    with pytest.raises(UsageError, match="not built"):
        module.library.__wrapped__()
    assert not (tmp_path / "none").exists()
