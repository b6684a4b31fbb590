"""What a cut costs: milliseconds per token, and bytes on each node.

A token passes every stage and every link once: that sum is a *lap*. With one session a lap is what a token takes. With
several, stages and links work at the same time, and the busiest of them, the *bottleneck*, sets the pace, unless there
are too few sessions to keep it busy::

    token_ms = max(bottleneck_ms, lap_ms / sessions)

A link is busy while bytes leave it; its latency holds up a token but no other session.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Literal

import msgspec

from splitlm.core.cut import Cut, Segment
from splitlm.core.errors import CutError
from splitlm.core.profile import DeviceProfile, LinkProfile, ModelProfile

FRAME_BYTES = 64
"""A frame without its tensors; the way home of a ring that is not private carries little else."""

Objective = Literal["sum", "bottleneck"]
"""What a plan minimises: the lap of a single stream, or the pace of several."""


class Ring(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to plan with.

    Attributes:
        model: what is cut.
        devices: in the order of the ring, node 0 (the head) first.
        links: ``links[i]`` leaves node i; as many as devices, none for a single one.
        sessions: that decode at once.
        context_tokens: room for KV that each session needs.
        private: norm and head, with ``tail_blocks`` final blocks, on node 0.
        tail_blocks: final blocks that stay on node 0 in a private cut.
    """

    model: ModelProfile
    devices: tuple[DeviceProfile, ...]
    links: tuple[LinkProfile, ...] = ()
    sessions: int = 1
    context_tokens: int = 0
    private: bool = False
    tail_blocks: int = 0

    def __post_init__(self) -> None:
        wanted = len(self.devices) if len(self.devices) > 1 else 0
        if not self.devices or len(self.links) != wanted:
            raise CutError(
                f"{len(self.links)} links for {len(self.devices)} devices", expected="one link that leaves each device"
            )
        if self.sessions < 1:
            raise CutError(f"{self.sessions} sessions", expected="at least 1")
        if self.private and len(self.devices) < 2:
            raise CutError("A private cut needs at least two stages", remedy="Use --stages 2 or more")
        if not 0 <= self.tail_blocks < self.model.blocks or (self.tail_blocks and not self.private):
            raise CutError(
                f"{self.tail_blocks} tail blocks in a {'private' if self.private else 'plain'} cut",
                where="--tail-blocks",
                expected=f"0 to {self.model.blocks - 1} with --private, 0 without",
            )

    @property
    def objective(self) -> Objective:
        """``sum`` for one session, ``bottleneck`` for several."""
        return "sum" if self.sessions == 1 else "bottleneck"

    @property
    def hop_ms(self) -> tuple[float, ...]:
        """Latency and transmission of one token on each link."""
        return tuple(link.latency_ms + busy for link, busy in zip(self.links, self.busy_ms, strict=True))

    @property
    def busy_ms(self) -> tuple[float, ...]:
        """How long each link is taken by one token."""
        last = len(self.links) - 1
        return tuple(
            1e3 * (FRAME_BYTES + (self.model.hidden_bytes if i < last or self.private else 0)) / link.bytes_per_s
            for i, link in enumerate(self.links)
        )


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What a cut is expected to take per token.

    Attributes:
        objective: what counts.
        compute_ms: of each node.
        hop_ms: of each link.
        lap_ms: once round.
        bottleneck_ms: of the busiest node or link.
        token_ms: between two tokens of all sessions together.
    """

    objective: Objective
    compute_ms: tuple[float, ...]
    hop_ms: tuple[float, ...]
    lap_ms: float
    bottleneck_ms: float
    token_ms: float

    @property
    def tokens_per_s(self) -> float:
        """Of all sessions together."""
        return 1e3 / self.token_ms


def segment_ms(device: DeviceProfile, segment: Segment) -> float:
    """One decode step of one segment."""
    ms = device.fixed_ms + segment.count * device.block_ms
    return ms + device.embed_ms * segment.embed + device.head_ms * segment.head


def node_ms(ring: Ring, cut: Cut, node: int) -> float:
    """One token's compute on a node, all its segments."""
    return sum(segment_ms(ring.devices[node], segment) for segment in cut.held_by(node))


def predict(ring: Ring, cut: Cut) -> Prediction:
    """What a cut takes.

    Raises:
        CutError: it does not have the ring's number of nodes or the model's number of blocks.
    """
    _check(ring, cut)
    compute = tuple(node_ms(ring, cut, node) for node in range(cut.stages))
    hops = ring.hop_ms
    lap = sum(compute) + sum(hops)
    bottleneck = max(*compute, *ring.busy_ms, 0.0)
    return Prediction(
        objective=ring.objective,
        compute_ms=compute,
        hop_ms=hops,
        lap_ms=lap,
        bottleneck_ms=bottleneck,
        token_ms=max(bottleneck, lap / ring.sessions),
    )


def kv_sums(ring: Ring) -> tuple[int, ...]:
    """KV bytes of blocks ``[0, i)`` for all sessions at full context, for every i from 0 to the number of blocks."""
    model = ring.model
    windows = model.windows or (0,) * model.blocks
    rows = (min(ring.context_tokens, window) if window else ring.context_tokens for window in windows)
    return (0, *accumulate(n * model.kv_bytes * ring.sessions for n in rows))


def node_bytes(ring: Ring, cut: Cut) -> tuple[int, ...]:
    """Weights and KV of each node; a table that is embedding and head counts once where one node holds both."""
    _check(ring, cut)
    model, kv = ring.model, kv_sums(ring)
    held = []
    for node in range(cut.stages):
        parts = cut.held_by(node)
        embed, head = any(part.embed for part in parts), any(part.head for part in parts)
        size = sum(part.count * model.block_bytes + kv[part.end] - kv[part.begin] for part in parts)
        size += model.embed_bytes * embed + model.head_bytes * head - model.tied_bytes * (embed and head)
        held.append(size)
    return tuple(held)


def fits(ring: Ring, cut: Cut) -> bool:
    """Whether every node's budget holds what the cut gives it."""
    budgets = (device.memory_bytes for device in ring.devices)
    return all(size <= budget for size, budget in zip(node_bytes(ring, cut), budgets, strict=True))


def _check(ring: Ring, cut: Cut) -> None:
    if cut.stages != len(ring.devices) or cut.blocks != ring.model.blocks:
        raise CutError(
            f"A cut of {cut.blocks} blocks into {cut.stages} stages",
            expected=f"{ring.model.blocks} blocks and {len(ring.devices)} stages, one per device",
        )
    if cut.private != ring.private:
        raise CutError("The cut and the ring do not agree on whether norm and head stay with the embedding")
