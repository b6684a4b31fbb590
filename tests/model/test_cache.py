"""The cache of a block does what transformers' own layers do, in bounded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from splitlm.core.errors import ProtocolError
from splitlm.model.cache import GROWTH_ROWS, BlockKV, SessionCache

HEADS, DIM = 2, 3
chunks = st.lists(st.one_of(st.just(1), st.integers(1, 12), st.integers(50, 200)), min_size=1, max_size=40)
windows = st.one_of(st.none(), st.integers(2, 90))


def rows(n: int, start: int = 0, heads: int = HEADS, dim: int = DIM) -> torch.Tensor:
    """``[1, heads, n, dim]``, every number of its own."""
    return (
        torch.arange(start * heads * dim, (start + n) * heads * dim).view(n, heads, dim).transpose(0, 1)[None].float()
    )


@settings(max_examples=60, deadline=None)
@given(sizes=chunks, window=windows)
def test_it_is_transformers_layer(sizes: list[int], window: int | None) -> None:
    ours = BlockKV(window)
    theirs: Any = DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)
    seen = 0
    for n in sizes:
        assert ours.get_mask_sizes(n) == tuple(theirs.get_mask_sizes(n))
        key, value = rows(n, seen), -rows(n, seen)
        got, wanted = ours.update(key, value), theirs.update(key, value)
        assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
        seen += n
        assert ours.get_seq_length() == ours.seen == theirs.get_seq_length() == seen
        assert ours.rows == (seen if window is None else min(seen, window - 1))
        assert ours.nbytes == 2 * HEADS * DIM * 4 * ours.rows
        row = 2 * HEADS * DIM * 4
        assert ours.nbytes <= ours.allocated <= row * (max(ours.rows, 1) + max(GROWTH_ROWS, ours.rows // 16))
    assert ours.get_max_length() == theirs.get_max_length()
    assert ours.is_sliding == theirs.is_sliding


@settings(max_examples=20, deadline=None)
@given(window=st.integers(2, 90), first=st.integers(1, 300))
def test_what_an_update_returns_is_not_overwritten_by_itself(window: int, first: int) -> None:
    """Attention reads the rows after the update: those that fell out of the window must still be there."""
    layer = BlockKV(window)
    layer.update(rows(first), rows(first))
    kept = min(first, window - 1)
    for i in range(200):
        key, _ = layer.update(rows(1, first + i), rows(1, first + i))
        assert torch.equal(key, rows(min(kept + i, window - 1) + 1, first + i - min(kept + i, window - 1)))


@pytest.mark.parametrize("window", [None, 2, 100, 4096])
def test_copying_costs_a_constant_number_of_rows_per_token(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = BlockKV(window)
    moved = 0
    resize = BlockKV._resize
    replace = BlockKV._replace

    def count(self: BlockKV, *args: Any) -> Any:
        nonlocal moved
        moved += self.rows
        return resize(self, *args)

    def count_twice(self: BlockKV, *args: Any) -> Any:
        nonlocal moved
        moved += 2 * self.rows
        return replace(self, *args)

    monkeypatch.setattr(BlockKV, "_resize", count)
    monkeypatch.setattr(BlockKV, "_replace", count_twice)
    one = torch.ones(1, 1, 1, 1)
    steps = 6000
    for _ in range(steps):
        layer.update(one, one)
    assert moved <= 20 * steps
    assert moved > 0


def test_buffers_stay_where_they_are_while_there_is_room() -> None:
    layer = BlockKV()
    layer.update(rows(10), rows(10))
    before = layer.update(rows(1, 10), rows(1, 10))[0].data_ptr()
    for i in range(GROWTH_ROWS - 1):
        assert layer.update(rows(1, 11 + i), rows(1, 11 + i))[0].data_ptr() == before


@pytest.mark.parametrize("window", [None, 4])
def test_rows_of_consecutive_tokens_are_contiguous_bytes(window: int | None) -> None:
    layer = BlockKV(window)
    key, value = layer.update(rows(9), rows(9))
    assert key[0].transpose(0, 1).is_contiguous() and value[0].transpose(0, 1).is_contiguous()
    key, value = layer.update(rows(1, 9), rows(1, 9))
    assert key[0].transpose(0, 1).is_contiguous() and value[0].transpose(0, 1).is_contiguous()


def test_several_sequences_are_refused() -> None:
    with pytest.raises(ProtocolError, match="2 sequences"):
        BlockKV().update(rows(1).repeat(2, 1, 1, 1), rows(1).repeat(2, 1, 1, 1))


def test_keys_and_values_may_differ_in_width_and_type_is_kept() -> None:
    layer = BlockKV()
    key, value = layer.update(rows(3).bfloat16(), rows(3, dim=5).bfloat16())
    assert key.dtype == value.dtype == torch.bfloat16
    assert layer.nbytes == 3 * HEADS * (DIM + 5) * 2


def test_a_session_names_blocks_by_their_index_in_the_model() -> None:
    cache = SessionCache(range(3, 6), [None, 8, None])
    for block in (3, 4, 5):
        cache.update(rows(20, block), rows(20, block), block)
    assert [layer.rows for layer in cache.layers] == [20, 7, 20]
    assert cache.nbytes == 2 * HEADS * DIM * 4 * 47
    assert cache.is_sliding == [False, True, False]
    assert cache.get_seq_length() == 20
    with pytest.raises(KeyError):
        cache.update(rows(1), rows(1), 0)


def test_known_answers_of_two_shapes() -> None:
    """Llama 3.2 1B and 3B in bfloat16: 2048 and 4096 bytes per token and block."""
    for heads, dim, wanted in ((8, 64, 2048), (8, 128, 4096)):
        layer = BlockKV()
        some = torch.zeros(1, heads, 7, dim, dtype=torch.bfloat16)
        layer.update(some, some)
        assert layer.nbytes == 7 * wanted


def test_masks_are_sized_as_with_transformers_cache() -> None:
    """A stage whose first block slides must size its full blocks' mask by a full block, and the other way round."""
    for kinds in ([None, 8], [8, None], [8, 8], [None, None]):
        ours = SessionCache(range(2), kinds)
        theirs = DynamicCache()
        theirs.layers = [DynamicLayer() if k is None else DynamicSlidingWindowLayer(k) for k in kinds]
        for n in (20, 3, 1):
            for i in range(2):
                assert ours.get_mask_sizes(n, i) == tuple(theirs.get_mask_sizes(n, i))
                assert ours.get_query_offset(i) == theirs.get_query_offset(i)
            for i in range(2):
                ours.update(rows(n), rows(n), i)
                theirs.update(rows(n), rows(n), i)
