"""A cut: which node holds which blocks of a model.

A model of N blocks is covered by segments in order. The first holds the embedding, the last the final norm and the
head. In a *private* cut the first node also holds the last segment, so that every other machine sees hidden states
only. Cuts are values: a changed cut is a new one with a higher epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import msgspec

from splitlm.core.errors import CutError


class Segment(msgspec.Struct, frozen=True):
    """A contiguous part of a model: blocks ``[begin, end)``, with the embedding or the head at an end of the model."""

    begin: int
    end: int
    embed: bool = False
    head: bool = False

    @property
    def count(self) -> int:
        """Number of blocks."""
        return self.end - self.begin

    @property
    def blocks(self) -> range:
        """The indices of the blocks, in order."""
        return range(self.begin, self.end)

    def __str__(self) -> str:
        blocks = f"block {self.begin}" if self.count == 1 else f"blocks {self.begin}–{self.end - 1}"
        parts = ["embedding"] * self.embed + [blocks] * (self.count > 0)
        return " + ".join([*parts, *["head"] * self.head]) or "nothing"


class Cut(msgspec.Struct, frozen=True):
    """The ordered segments of a model, and the node that holds each.

    Attributes:
        blocks: number of blocks of the model.
        segments: in the order in which a token visits them.
        nodes: ``nodes[i]`` is the node that holds ``segments[i]``; node 0 is the head.
        epoch: grows by one with every committed change.
    """

    blocks: int
    segments: tuple[Segment, ...]
    nodes: tuple[int, ...]
    epoch: int = 0

    def __post_init__(self) -> None:
        if not self.segments or len(self.segments) != len(self.nodes):
            raise CutError("A cut needs one node for every segment", expected=f"{len(self.segments)} nodes")
        at = 0
        for i, part in enumerate(self.segments):
            if part.begin != at or part.end < part.begin:
                raise CutError(
                    f"Segment {i} holds blocks [{part.begin}, {part.end})",
                    expected=f"a segment that begins at block {at}, so that no block is missing or held twice",
                )
            if part.embed != (i == 0) or part.head != (i == len(self.segments) - 1):
                raise CutError("The embedding belongs to the first segment and the head to the last, and to no other")
            if part.count == 0 and not (part.embed or part.head):
                raise CutError(f"Segment {i} holds nothing", expected="at least one block")
            at = part.end
        if at != self.blocks:
            raise CutError(f"The segments end at block {at}", expected=f"all {self.blocks} blocks")
        once = self.nodes[:-1] if self.private else self.nodes
        if once != tuple(range(len(once))) or (self.private and self.stages == 1):
            raise CutError(
                f"Nodes {self.nodes} visit a node twice or out of order",
                expected="0, 1, 2 and so on, and at most one more 0 at the end",
            )

    @property
    def stages(self) -> int:
        """Number of nodes."""
        return len(set(self.nodes))

    @property
    def private(self) -> bool:
        """Whether the head's node also holds the last segment of a ring of several."""
        return len(self.segments) > 1 and self.nodes[-1] == 0

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The first block of every segment but the first."""
        return tuple(part.begin for part in self.segments[1:])

    def held_by(self, node: int) -> tuple[Segment, ...]:
        """The segments of one node, in order."""
        return tuple(part for part, owner in zip(self.segments, self.nodes, strict=True) if owner == node)

    def next_node(self, node: int) -> int:
        """The node that receives what this node sends; the last stage's next is the head (node 0)."""
        return (node + 1) % self.stages


def make_cut(blocks: int, boundaries: Sequence[int], *, private: bool = False, tail_blocks: int = 0) -> Cut:
    """The cut of a model of ``blocks`` blocks at the given boundaries.

    Args:
        blocks: number of blocks N.
        boundaries: S−1 increasing block indices; stage s owns blocks ``[b_s, b_{s+1})``. In a private cut the first may
            be 0: then the head's node holds the embedding and no block.
        private: put the final norm and the head, with ``tail_blocks`` final blocks, on the first node.
        tail_blocks: blocks that stay with the head in a private cut.

    Raises:
        CutError: a boundary out of range or not increasing, or ``tail_blocks`` without ``private``.
    """
    if tail_blocks and not private:
        raise CutError("Tail blocks were asked for in a cut that is not private", remedy="Add --private")
    if private and not boundaries:
        raise CutError("A private cut needs at least two stages", remedy="Use --stages 2 or more")
    last = blocks - tail_blocks
    low = 0 if private else 1
    if not 0 <= tail_blocks < blocks:
        raise CutError(
            f"{tail_blocks} tail blocks do not fit a model of {blocks} blocks", expected=_span(0, blocks - 1)
        )
    for i, b in enumerate(boundaries):
        if not low <= b < last:
            raise CutError(
                f"Cut {b} is out of range for a model of {blocks} blocks",
                where="--cuts",
                expected=f"block indices: {allowed}" if (allowed := _span(low, last - 1)) else "no cuts: one stage",
            )
        if i and b <= boundaries[i - 1]:
            raise CutError(
                f"Cuts {','.join(map(str, boundaries))} do not increase",
                where="--cuts",
                expected="strictly increasing block indices, such as 6,11",
            )
    edges = [0, *boundaries, last]
    count = len(edges) - 1
    segments = [
        Segment(a, b, embed=i == 0, head=i == count - 1 and not private) for i, (a, b) in enumerate(pairwise(edges))
    ]
    nodes = list(range(count))
    if private:
        segments.append(Segment(last, blocks, head=True))
        nodes.append(0)
    return Cut(blocks, tuple(segments), tuple(nodes))


def balanced_boundaries(
    blocks: int, stages: int, *, head_cost: float = 0.0, private: bool = False, tail_blocks: int = 0
) -> tuple[int, ...]:
    """Boundaries that keep the slowest of ``stages`` equal machines as fast as possible.

    Args:
        head_cost: what the head costs per token, in blocks (a large vocabulary makes it several).

    Raises:
        CutError: fewer than one stage, or more stages or tail blocks than the model's blocks allow.
    """
    if stages < 1:
        raise CutError(f"{stages} stages", where="--stages", expected="at least 1")
    if not 0 <= tail_blocks < blocks:
        raise CutError(
            f"{tail_blocks} tail blocks do not fit a model of {blocks} blocks",
            where="--tail-blocks",
            expected=_span(0, blocks - 1),
        )
    free = blocks - tail_blocks
    if stages > free:
        raise CutError(
            f"{stages} stages for {free} blocks that can be spread",
            where="--stages",
            expected=f"at most {free}: every stage holds at least one block",
        )
    home = head_cost + tail_blocks

    def fits(limit: float) -> tuple[int, ...] | None:
        """Greedy from the front: every stage takes what the limit allows and leaves one block for each that follows."""
        edges, at = [], 0
        for s in range(stages):
            room = limit - (home if s == (0 if private else stages - 1) else 0)
            take = max(1, min(int(room + 1e-9), free - at - (stages - 1 - s)))
            if take > room + 1e-9 and take > 1:
                return None
            at += take
            edges.append(at)
        return tuple(edges[:-1]) if at == free else None

    sizes = {float(n) for n in range(1, free + 1)} | {n + home for n in range(1, free + 1)}
    for limit in sorted(sizes):
        edges = fits(limit)
        if edges is not None:
            return edges
    return tuple(range(1, stages))


def all_boundaries(blocks: int, stages: int) -> list[tuple[int, ...]]:
    """Every way to cut ``blocks`` blocks into ``stages`` stages of at least one block (for exhaustive tests)."""
    return list(combinations(range(1, blocks), stages - 1))


class Move(msgspec.Struct, frozen=True):
    """One block that changes its node."""

    block: int
    source: int
    target: int


def diff(old: Cut, new: Cut) -> tuple[Move, ...]:
    """The blocks that move between two cuts of one model, in the order of the blocks; epochs are not compared.

    Raises:
        CutError: other nodes or another model, a block that would skip a node, the tail of a private cut moved, or a
            stage left without a block.
    """
    if (old.blocks, old.nodes) != (new.blocks, new.nodes):
        raise CutError(
            f"A cut of {new.blocks} blocks over nodes {new.nodes} cannot follow one of {old.blocks} over {old.nodes}",
            expected="the same model and the same nodes: only boundaries move",
        )
    if old.private and old.boundaries[-1] != new.boundaries[-1]:
        raise CutError("The final blocks of a private cut stay with the head", expected=f"{old.boundaries[-1]}")
    _check_nonempty(new)
    moves = []
    for block, (source, target) in enumerate(zip(_owners(old), _owners(new), strict=True)):
        if abs(source - target) > 1:
            raise CutError(
                f"Block {block} would move from node {source} to node {target}",
                expected="moves between neighbours",
                remedy="Move it in several steps",
            )
        if source != target:
            moves.append(Move(block, source, target))
    return tuple(moves)


def shift(cut: Cut, boundary: int, k: int) -> Cut:
    """The cut after one boundary moved by k blocks, with the next epoch.

    Args:
        cut: the one that serves.
        boundary: s from 1 to stages − 1, the one between stages s−1 and s; the ends of the model are fixed.
        k: above 0, stage s−1 pulls k blocks back from stage s; below 0, it pushes −k blocks forward to it.

    Raises:
        CutError: no such boundary, nothing to move, or a stage left without a block.
    """
    if not 1 <= boundary < cut.stages:
        raise CutError(
            f"Boundary {boundary} cannot move in a cut of {cut.stages} stages",
            where="--shift-boundary",
            expected=f"{_span(1, cut.stages - 1)}: the ends of the model are fixed"
            if cut.stages > 1
            else "at least two stages",
        )
    if k == 0:
        raise CutError("A shift by 0 blocks moves nothing", where="--shift-k", expected="a number other than 0")
    edges = [0, *cut.boundaries, cut.blocks]
    edges[boundary] += k
    low, high = edges[boundary - 1] + _least(cut, boundary - 1), edges[boundary + 1] - _least(cut, boundary)
    if not low <= edges[boundary] <= high:
        now = edges[boundary] - k
        allowed = " or ".join(filter(None, (_span(low - now, -1), _span(1, high - now))))
        raise CutError(
            f"Boundary {boundary} at block {now} cannot move by {k}",
            where="--shift-k",
            expected=f"{allowed}, so that every stage keeps a block"
            if allowed
            else "another boundary: neither stage beside this one has a block to spare",
        )
    segments = tuple(
        msgspec.structs.replace(part, begin=begin, end=end)
        for part, (begin, end) in zip(cut.segments, pairwise(edges), strict=True)
    )
    return msgspec.structs.replace(cut, segments=segments, epoch=cut.epoch + 1)


def _span(first: int, last: int) -> str:
    """Whole numbers from first to last, in words; empty where there is none."""
    return "" if first > last else str(first) if first == last else f"{first} to {last}"


def _owners(cut: Cut) -> list[int]:
    return [node for part, node in zip(cut.segments, cut.nodes, strict=True) for _ in part.blocks]


def _least(cut: Cut, segment: int) -> int:
    """Fewest blocks a segment may hold: those on the node of a private cut's head may hold none."""
    return 0 if cut.private and cut.nodes[segment] == 0 else 1


def _check_nonempty(cut: Cut) -> None:
    for i, part in enumerate(cut.segments):
        if part.count < _least(cut, i):
            raise CutError(f"Stage {cut.nodes[i]} would be left without a block", expected="at least one for each")
