"""Buffers: aligned, bounded, reused, given back from any thread."""

from __future__ import annotations

import ctypes
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitlm.core.errors import ProtocolError
from splitlm.wire.pool import SMALLEST, BufferPool, Lease


def take(pool: BufferPool, nbytes: int) -> Lease:
    lease = pool.take(nbytes)
    assert lease is not None
    return lease


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=10))
def test_buffers_are_aligned_have_the_asked_length_and_do_not_overlap(sizes: list[int]) -> None:
    pool = BufferPool(1 << 24)
    leases = [take(pool, n) for n in sizes]
    for i, lease in enumerate(leases):
        assert address(lease.view) % 64 == 0
        lease.view[:] = bytes([i]) * lease.view.nbytes
    for i, (lease, n) in enumerate(zip(leases, sizes, strict=True)):
        assert bytes(lease.view) == bytes([i]) * n


def test_the_bound_holds_and_a_release_makes_room() -> None:
    pool = BufferPool(4 * SMALLEST)
    leases = [take(pool, SMALLEST) for _ in range(4)]
    assert pool.take(1) is None
    leases[0].release()
    leases[0].release()
    again = take(pool, 1)
    assert pool.take(1) is None
    assert pool.lent_bytes == pool.held_bytes == 4 * SMALLEST
    again.release()
    assert pool.lent_bytes == 3 * SMALLEST


def test_a_released_buffer_is_reused_and_its_old_lease_has_no_bytes() -> None:
    pool = BufferPool(1 << 20)
    lease = take(pool, 5000)
    where = address(lease.view)
    lease.release()
    assert lease.view.nbytes == 0
    assert address(take(pool, 8192).view) == where


def test_free_buffers_of_other_sizes_give_way() -> None:
    pool = BufferPool(16 * SMALLEST)
    for lease in [take(pool, SMALLEST) for _ in range(16)]:
        lease.release()
    assert take(pool, 16 * SMALLEST).view.nbytes == 16 * SMALLEST
    assert pool.held_bytes == 16 * SMALLEST


@pytest.mark.parametrize(("nbytes", "held"), [(1, 4096), (4096, 4096), (4097, 8192), (65536, 65536), (65537, 131072)])
def test_sizes_are_powers_of_two(nbytes: int, held: int) -> None:
    pool = BufferPool(1 << 20)
    take(pool, nbytes)
    assert pool.held_bytes == held


def test_what_can_never_fit_is_refused_by_name() -> None:
    pool = BufferPool(3 * SMALLEST)
    pool.check_fits(2 * SMALLEST)
    with pytest.raises(ProtocolError, match=rf"head: A frame with {2 * SMALLEST + 1} payload bytes.*{3 * SMALLEST}"):
        pool.check_fits(2 * SMALLEST + 1, "head")


def test_the_allocator_is_injected() -> None:
    asked: list[int] = []

    def allocate(nbytes: int) -> bytearray:
        asked.append(nbytes)
        return bytearray(nbytes)

    pool = BufferPool(1 << 20, allocate)
    take(pool, 100).release()
    take(pool, 200)
    assert len(asked) == 1
    assert asked[0] >= SMALLEST


def test_whoever_waits_is_called_once_and_not_after_forget() -> None:
    pool = BufferPool(SMALLEST)
    calls: list[str] = []
    one, two = (lambda: calls.append("one")), (lambda: calls.append("two"))
    lease = take(pool, 1)
    for wake in (one, one, two):
        pool.when_free(wake)
    pool.forget(two)
    lease.release()
    assert calls == ["one"]
    take(pool, 1).release()
    assert calls == ["one"]


def test_many_threads_release_without_losing_a_byte() -> None:
    pool = BufferPool(64 * SMALLEST)

    def churn() -> None:
        for i in range(300):
            lease = pool.take(1 + i % 9000)
            if lease is not None:
                lease.release()

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert pool.lent_bytes == 0
    assert pool.held_bytes <= 64 * SMALLEST


def test_what_was_made_and_what_was_used_again_is_counted() -> None:
    pool = BufferPool(4 * SMALLEST)
    for _ in range(3):
        take(pool, 100).release()
    both = take(pool, 1), take(pool, SMALLEST)
    assert (pool.allocations, pool.reuses) == (2, 3)
    for lease in both:
        lease.release()
