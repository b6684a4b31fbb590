"""Cut equals uncut, bit for bit, at every step: every family, every boundary, chunk size and pair of loaders.

The uncut side is transformers' own model, loader and cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from splitlm.check.compare import Comparison
from splitlm.core.cut import all_boundaries, make_cut
from splitlm.model.load import Loader
from tests.parity.chain import Bench, long_prompt
from tests.tiny import BLOCKS, FAMILIES, WINDOW

PROMPT = long_prompt()
CUTS = [cut for stages in range(1, BLOCKS + 1) for cut in all_boundaries(BLOCKS, stages)]
PRIVATE = [
    make_cut(BLOCKS, cut, private=True, tail_blocks=tail)
    for tail in (0, 1)
    for front in (0, 1, 2)
    for cut in ((front,), (front, front + 1), (front, BLOCKS - 2), tuple(range(front, BLOCKS - tail)))
    if len(set(cut)) == len(cut) and cut[-1] < BLOCKS - tail
]


@pytest.fixture(scope="module")
def benches(tiny: Callable[[str], Path]) -> Callable[..., Bench]:
    made: dict[tuple[str, str], Bench] = {}

    def get(family: str, dtype: str = "auto") -> Bench:
        return made.setdefault((family, dtype), made.get((family, dtype)) or Bench(tiny(family), dtype))

    return get


def same(result: Comparison, what: object) -> None:
    assert result.ok, f"{what}: {result.failure}"
    assert result.bit_equal, f"{what}: max |Δlogit| {result.delta}, ids {result.matches}/{len(result.steps)}"


def test_every_number_of_stages_and_private_cuts_with_empty_fronts_and_tails_are_among_the_cases() -> None:
    assert {len(cut) + 1 for cut in CUTS} == set(range(1, BLOCKS + 1)) and len(CUTS) == 2 ** (BLOCKS - 1)
    assert {(c.segments[0].count == 0, c.segments[-1].count) for c in PRIVATE} == {
        (empty, tail) for empty in (True, False) for tail in (0, 1)
    }
    assert len(PROMPT) > 2 * WINDOW


@pytest.mark.parametrize("family", FAMILIES)
def test_every_cut_of_every_family(family: str, benches: Callable[..., Bench]) -> None:
    for cut in CUTS:
        same(benches(family).compare(cut, PROMPT), cut)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 3, WINDOW, 2 * WINDOW + 4])
def test_every_chunk_size(family: str, chunk: int, benches: Callable[..., Bench]) -> None:
    """Chunks shorter than the window, as long, longer, and one that leaves a single row over."""
    for cut in [(), (2,), (1, 3)]:
        same(benches(family).compare(cut, PROMPT, chunk=chunk), (cut, chunk))


@pytest.mark.parametrize("family", FAMILIES)
def test_private_cuts(family: str, benches: Callable[..., Bench]) -> None:
    for cut in PRIVATE:
        same(benches(family).compare(cut, PROMPT, new=4), [str(segment) for segment in cut.segments])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("loader", "ref"), [("hf", "hf"), ("hf", "shard"), ("shard", "shard")])
def test_either_loader_on_either_side(family: str, loader: Loader, ref: Loader, benches: Callable[..., Bench]) -> None:
    for cut in [(2,), (1, 2, 4)]:
        same(benches(family).compare(cut, PROMPT, chunk=5, loader=loader, ref=ref), (cut, loader, ref))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ref", ["shard", "hf"])
def test_bfloat16(family: str, ref: Loader, benches: Callable[..., Bench]) -> None:
    for cut in [(1,), (2, 3), (1, 2, 3, 4)]:
        same(benches(family, "bfloat16").compare(cut, PROMPT, chunk=6, ref=ref), (cut, ref))


@pytest.mark.parametrize("length", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1])
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mistral"])
def test_decoding_across_the_edge_of_the_window(family: str, length: int, benches: Callable[..., Bench]) -> None:
    same(benches(family).compare((1, 3), PROMPT[:length], new=WINDOW + 3), length)
