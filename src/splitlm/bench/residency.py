"""How much memory a stage took, as a share of what it may take: weights and KV held once, and little beside."""

from __future__ import annotations

import math
from collections.abc import Sequence

from splitlm.model.load import ModelFiles
from splitlm.telemetry.record import Final, Record, StageMeta, Step

MIB = 2**20
ALLOWED = 1.1
"""Of weights and KV; beside them the runtime's buffers, a prefill chunk's activations, and one tensor being read."""
BUFFERS = 64 * MIB
FLOAT = 4


def stage_shares(files: ModelFiles, records: Sequence[Record], chunk: int) -> dict[str, float]:
    """Peak resident memory beyond the imports ÷ its bound, of each stage of a ring, from its traces.

    Args:
        chunk: prompt tokens per prefill step.
    """
    ends = {record.node: record for record in records if isinstance(record, Final)}
    kv: dict[int, int] = {}
    for record in records:
        if isinstance(record, Step):
            kv[record.node] = max(kv.get(record.node, 0), record.kv_bytes)
    return {
        str(meta.node): (ends[meta.node].peak_rss_mb - ends[meta.node].import_rss_mb)
        * MIB
        / (
            ALLOWED * (meta.resident_bytes + kv.get(meta.node, 0))
            + BUFFERS
            + _activations(files, chunk)
            + _largest(files, meta)
        )
        for meta in records
        if isinstance(meta, StageMeta) and meta.node in ends
    }


def _activations(files: ModelFiles, chunk: int) -> int:
    """Bytes that one block's step over a chunk holds at once: rows in and out, the MLP's, and queries and keys."""
    config = files.config
    inner = int(getattr(config, "intermediate_size", None) or 4 * files.hidden)
    heads = int(config.num_attention_heads)
    return chunk * FLOAT * (4 * files.hidden + 3 * inner + 2 * heads * 2 * chunk)


def _largest(files: ModelFiles, meta: StageMeta) -> int:
    """Bytes of the largest tensor that a stage reads, in the element type it is held in."""
    prefixes = [files.key(files.family.block_prefix(block)) for block in meta.blocks]
    ends = [word for word in ("embedding", "head") if word in meta.segments]
    shared = [files.key(files.family.embed_key), files.key(files.family.head_key)] if ends else []
    sizes = [
        math.prod(entry.shape)
        for key, entry in files.index.entries.items()
        if key in shared or any(key.startswith(prefix) for prefix in prefixes)
    ]
    return files.dtype.itemsize * max(sizes, default=0)
