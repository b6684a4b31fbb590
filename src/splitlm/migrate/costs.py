"""What one change of the cut cost one node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Costs:
    """Milliseconds and bytes.

    Attributes:
        weights_ms: building and reading the blocks that came (page cache or disk: the time does not say which).
        kv_bytes: KV installed here, exactly that of the rows which the windows keep.
        kv_tokens: tokens that the sessions had seen.
        kv_ms: sending or awaiting the last rows: includes waiting for the peer, so an upper bound.
        sent_bytes: KV that left, rows included that a sliding window dropped later.
        background_bytes: the part of it that left while tokens flowed.
        commit_ms: applying the change on the compute thread.
        release_ms: giving back the memory of what left.
    """

    weights_ms: float = 0.0
    kv_bytes: int = 0
    kv_tokens: int = 0
    kv_ms: float = 0.0
    sent_bytes: int = 0
    background_bytes: int = 0
    commit_ms: float = 0.0
    release_ms: float = 0.0
