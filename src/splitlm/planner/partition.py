"""The best cut for measured devices: exact, by dynamic programming over (nodes placed, blocks placed).

For a limit t, ``_best`` is the cut with the shortest lap among those in which no node computes longer than t and every
node's memory suffices. Laps only shrink as t grows, so the t at which ``max(t, lap / sessions)`` is least is found by
bisection over the values that a node can take. PipeDream (arXiv 1806.03377) places stages by the same recurrence.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from splitlm.core.cut import Cut, Segment, make_cut
from splitlm.core.errors import CutError
from splitlm.planner.cost import Ring, kv_sums, segment_ms

SAME = 1 + 1e-9
"""Sums of the same numbers in another order differ by less than this factor."""
MIB = 2**20


@dataclass(frozen=True)
class _Place:
    """What one node may hold: a row of blocks, and what each such row costs there.

    Attributes:
        least: blocks it must hold; 0 for the head's node of a private ring, which has embedding and head anyway.
        base_ms: compute without the row's blocks.
        block_ms: and for each of them.
        bytes: what it holds besides them.
    """

    name: str
    least: int
    base_ms: float
    block_ms: float
    bytes: int
    budget: int

    def ms(self, count: int) -> float:
        """Compute with a row of ``count`` blocks."""
        return self.base_ms + count * self.block_ms


@dataclass(frozen=True)
class _Found:
    lap_ms: float
    edges: tuple[int, ...]


def partition(ring: Ring, within: Sequence[tuple[int, int]] | None = None) -> Cut:
    """The cut with the least ``token_ms`` (see ``plan.cost``) that every node has the memory for.

    Among equals the one with the shorter lap, then the one whose busiest node computes least. Every node holds at
    least one block, but the head's of a private ring may hold none.

    Args:
        within: for each boundary between two nodes the least and the greatest block it may be at; None: any.

    Raises:
        CutError: more devices than blocks, or too little memory; the message says where and how much is missing.
    """
    places = _places(ring)
    free = ring.model.blocks - ring.tail_blocks
    if sum(place.least for place in places) > free:
        raise CutError(
            f"{len(places)} devices for {free} blocks that can be spread",
            expected="at least one block for every device",
            remedy="Leave some devices out",
        )
    kv = kv_sums(ring)
    ends = [*(within if within is not None else [(0, free)] * (len(places) - 1)), (free, free)]
    limits = sorted({place.ms(n) for place in places for n in range(place.least, free + 1)})

    @cache
    def best(limit: float) -> _Found | None:
        return _best(places, ends, ring.model.block_bytes, kv, limit)

    if best(math.inf) is None:
        raise _lacking(places, ring, free, kv)
    hops, floor = sum(ring.hop_ms), max(ring.busy_ms, default=0.0)

    def token_ms(limit: float, found: _Found | None) -> float:
        return math.inf if found is None else max(limit, floor, (found.lap_ms + hops) / ring.sessions)

    def rules(limit: float) -> bool:
        found = best(limit)
        return found is not None and limit >= (found.lap_ms + hops) / ring.sessions

    # Where the limit outgrows the lap's share: the optimum is there or one step before.
    turn = bisect_left(limits, True, key=rules)
    around = limits[max(0, turn - 1) : turn + 1] or limits[-1:]
    goal = min(token_ms(t, best(t)) for t in around)
    shortest = best(goal * SAME)
    if shortest is None:
        raise _lacking(places, ring, free, kv)

    def as_short(limit: float) -> bool:
        found = best(limit * SAME)
        return found is not None and found.lap_ms <= shortest.lap_ms * SAME

    calm = bisect_left(limits, True, key=as_short)
    found = best(limits[calm] * SAME) or shortest
    return make_cut(ring.model.blocks, found.edges[1:-1], private=ring.private, tail_blocks=ring.tail_blocks)


def _places(ring: Ring) -> list[_Place]:
    model, last = ring.model, len(ring.devices) - 1
    kv = kv_sums(ring)
    tail = Segment(model.blocks - ring.tail_blocks, model.blocks, head=True)
    places = []
    for node, device in enumerate(ring.devices):
        embed, home = node == 0, node == 0 and ring.private
        head = home or (node == last and not ring.private)
        ms = segment_ms(device, Segment(0, 0, embed=embed, head=head and not home))
        size = model.embed_bytes * embed + model.head_bytes * head - model.tied_bytes * (embed and head)
        if home:
            ms += segment_ms(device, tail)
            size += tail.count * model.block_bytes + kv[tail.end] - kv[tail.begin]
        places.append(_Place(device.name, 0 if home else 1, ms, device.block_ms, size, device.memory_bytes))
    return places


def _best(
    places: Sequence[_Place], ends: Sequence[tuple[int, int]], block_bytes: int, kv: Sequence[int], limit: float
) -> _Found | None:
    """The shortest lap in which no node computes longer than ``limit``; None when there is no such cut.

    ``reach[b]`` is the best way to put blocks ``[0, b)`` on the nodes so far.
    """
    free = ends[-1][1]
    reach: dict[int, _Found] = {0: _Found(0.0, (0,))}
    for at, (place, (low, high)) in enumerate(zip(places, ends, strict=True)):
        after = sum(other.least for other in places[at + 1 :])
        times = [place.ms(n) for n in range(free + 1)]
        onward: dict[int, _Found] = {}
        for begin, found in reach.items():
            room = place.budget - place.bytes + kv[begin]
            for end in range(max(begin + place.least, low), min(free - after, high) + 1):
                count = end - begin
                if times[count] > limit or count * block_bytes + kv[end] > room:
                    break
                lap = found.lap_ms + times[count]
                if end not in onward or lap < onward[end].lap_ms:
                    onward[end] = _Found(lap, (*found.edges, end))
        reach = onward
    return reach.get(free)


def _lacking(places: Sequence[_Place], ring: Ring, free: int, kv: Sequence[int]) -> CutError:
    """Why there is no cut: fill the nodes in turn, and see what is left over."""
    block = ring.model.block_bytes
    at, said = 0, []
    for i, place in enumerate(places):
        after = sum(other.least for other in places[i + 1 :])
        room = place.budget - place.bytes + kv[at]
        end = at
        while end < free - after and (end + 1 - at) * block + kv[end + 1] <= room:
            end += 1
        if end - at < place.least or room < kv[at]:
            need = place.bytes + place.least * block + kv[at + place.least] - kv[at]
            return CutError(
                f"{place.name} has room for {place.budget / MIB:.0f} MiB and must hold at least {need / MIB:.0f} MiB",
                where=f"devices[{place.name}].memory_bytes",
                expected=f"{(need - place.budget) / MIB:.0f} MiB more",
                remedy="Leave it out, raise its budget, or use a smaller context, fewer sessions or a smaller --dtype",
            )
        said.append(f"{place.name} {end - at}")
        at = end
    if at == free:
        return CutError("No cut within these bounds suits every device's memory", expected="wider bounds")
    missing = (free - at) * block + kv[free] - kv[at]
    return CutError(
        f"{free - at} of {free} blocks find no room ({', '.join(said)} blocks)",
        where="devices",
        expected=f"{missing / MIB:.0f} MiB more memory in all",
        remedy="Add a device, raise a budget, or use a smaller context, fewer sessions or a smaller --dtype",
    )
