"""What one move between two neighbours cost one of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Costs:
    """Milliseconds and bytes of one side of a move.

    Attributes:
        peer: the neighbour.
        role: ``donor`` or ``receiver``.
        epoch: that the move brings.
        blocks: that move.
        construct_ms: receiver: building modules without weights, on the loader thread.
        read_ms: receiver: reading their tensors.
        weight_pack_ms: receiver: packing them for its engine.
        cached: receiver: whether they were in the page cache before; None where the system does not say.
        kv_bytes: receiver: KV installed, exactly that of the rows which the windows keep. Donor: KV sent, rows included
            that a sliding window dropped later.
        kv_tokens: rows that moved, over sessions and blocks.
        kv_ms: sending or awaiting the last rows while the ring stood still: includes waiting for the peer.
        pack_ms: donor: copying rows out of live caches, the wait for the step at hand included.
        background_bytes: donor: the part of ``kv_bytes`` that left while tokens flowed.
        commit_ms: applying the change.
    """

    peer: int
    role: Literal["donor", "receiver"]
    epoch: int
    blocks: list[int] = field(default_factory=list)
    construct_ms: float = 0.0
    read_ms: float = 0.0
    weight_pack_ms: float = 0.0
    cached: bool | None = None
    kv_bytes: int = 0
    kv_tokens: int = 0
    kv_ms: float = 0.0
    pack_ms: float = 0.0
    background_bytes: int = 0
    commit_ms: float = 0.0
