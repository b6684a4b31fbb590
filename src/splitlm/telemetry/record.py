"""The records of a run. Each is one JSON line whose ``record`` key names its kind; docs/walk.md lists every field.

Times ending in ``_ms`` are milliseconds as floats; ``_ns`` are ``time.monotonic_ns()``, comparable on one machine only.
A field whose value is None is left out of the line.
"""

from __future__ import annotations

import msgspec


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="record", tag="token"):
    """One pass of one session through one segment: a token, or one chunk of a prompt.

    ``recv_wait_ms + queue_ms + compute_ms + send_ms`` runs from the end of this stage's previous step to the end of
    this one, so with one session a decode step's sum is one lap.

    Sessions that share one forward have a record each, with the times of the whole: the same ``start_ns``, ``end_ns``
    and ``compute_ms``, and ``send_ms`` until the last of their frames is with the kernel. Divide all four times by
    ``batch`` before adding up over sessions, or a shared step counts several times.

    Attributes:
        node: the stage's node.
        session: the session's number.
        position: of the first row.
        count: rows (1 in decode).
        epoch: of the cut under which it was computed.
        prefill: whether the rows belong to the prompt.
        compute_ms: forward alone; sampling and embedding included.
        recv_wait_ms: starved: nothing to do for this stage until the frame had come.
        queue_ms: from the frame's arrival to the start of compute.
        send_ms: from the end of compute until the frame is with the kernel.
        bytes_in: size of the frame that came, header included.
        bytes_out: size of the frame that left.
        kv_bytes: of all this session's KV on this stage, after the step.
        rss_mb: resident memory of the process, MiB.
        start_ns: start of compute.
        end_ns: end of compute.
        segment: index in the cut of the segment that computed; left out where the node holds one (then it is ``node``).
        batch: how many sessions shared the forward; left out where it is 1.
        tpot_ms: head, decode only: this step's lap, from the arrival of the token it takes in to the arrival of the
            token that came of it.
        ttft_ms: head, a prompt's last chunk only: from the request to the arrival of the first token.
    """

    node: int
    session: int
    position: int
    count: int
    epoch: int
    prefill: bool
    compute_ms: float
    recv_wait_ms: float
    queue_ms: float
    send_ms: float
    bytes_in: int
    bytes_out: int
    kv_bytes: int
    rss_mb: float
    start_ns: int
    end_ns: int
    segment: int | None = None
    batch: int = 1
    tpot_ms: float | None = None
    ttft_ms: float | None = None


class StageMeta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="record", tag="stage_meta"):
    """What a stage is; the first line of its trace.

    Attributes:
        node: its node.
        name: how it calls itself.
        segments: what it holds, in words.
        blocks: indices of its blocks.
        parameters: elements of its tensors, a tied table once.
        resident_bytes: bytes of its tensors, a tied table once.
        dtype: of its weights.
        device: where it computes.
        threads: intra-op threads.
        compute: its compute engine.
        asked: the engine it was asked to run, where it runs another one, and why.
        uncompiled: why torch's calls, not compiled steps, stand between its products; left out where those run.
        pack_ms: packing its weights.
        inexact: share of the packed numbers that float16 does not hold exactly.
        unpacked: matrices that could not be packed and stay in float32, and why; the first few.
        unpacked_count: how many they are.
        construct_ms: building the modules on the meta device.
        read_ms: reading tensors; ``read_kind`` says what that is.
        assign_ms: assigning them to the modules.
        read_kind: "pread" (bytes copied from the file) or "mmap set-up" (pages come later, on first touch).
        import_rss_mb: peak resident memory after the imports and before the weights, MiB.
        versions: version of each library that computes.
    """

    node: int
    name: str
    segments: str
    blocks: list[int]
    parameters: int
    resident_bytes: int
    dtype: str
    device: str
    threads: int
    compute: str
    construct_ms: float
    read_ms: float
    assign_ms: float
    read_kind: str
    import_rss_mb: float
    versions: dict[str, str]
    asked: str = ""
    uncompiled: str = ""
    pack_ms: float = 0.0
    inexact: float = 0.0
    unpacked: list[str] = []
    unpacked_count: int = 0


class Session(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="record", tag="session"):
    """One generation that ended, written by the head.

    Attributes:
        session: its number.
        prompt_tokens: tokens of the prompt.
        new_tokens: tokens generated.
        finish: why it ended; ``failed`` where an error ended it, or the ring.
        reason: that error, in words.
        seed: of the random choice of tokens; left out where the most probable one was taken.
        ttft_ms: from the request to the first token; left out when there was none.
        tpot_p50_ms: median lap; left out below two tokens.
        tpot_p99_ms: 99th percentile of the laps; left out below two tokens.
    """

    session: int
    prompt_tokens: int
    new_tokens: int
    finish: str
    reason: str | None = None
    seed: int | None = None
    ttft_ms: float | None = None
    tpot_p50_ms: float | None = None
    tpot_p99_ms: float | None = None


class Final(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="record", tag="stage_end"):
    """What a stage did and held; the last line of its trace.

    Attributes:
        node: its node.
        tokens: rows it computed, prompts included.
        peak_rss_mb: peak resident memory of the process, MiB.
        import_rss_mb: the same, after the imports and before the weights.
        compute_ms: sum over its steps, one that sessions shared counted once; so are the other times.
        recv_wait_ms: sum over its steps.
        queue_ms: sum over its steps.
        send_ms: sum over its steps.
        bytes_in: sum over its steps.
        bytes_out: sum over its steps.
    """

    node: int
    tokens: int
    peak_rss_mb: float
    import_rss_mb: float
    compute_ms: float
    recv_wait_ms: float
    queue_ms: float
    send_ms: float
    bytes_in: int
    bytes_out: int


class Window(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="record", tag="window"):
    """One barrier at the end of a window, as one node saw it; node 0 leads.

    Attributes:
        node: the node.
        seq: number of the barrier.
        epoch: that serves after it.
        decision: ``noop``, ``forced-shift`` or ``auto``.
        barrier_ms: head: from the end of the window until tokens may flow, the drain included. Others: from PREPARE to
            DONE (or to the abort), the protocol alone.
        prestage_ms: head: from PREPARE to the last READY; others: to their own READY. Left out when it never came.
        commit_ms: head: from COMMIT to the last DONE; others: to their own DONE. Left out after an abort.
        drain_ms: head: waiting for the tokens in flight, before PREPARE.
        n_acks: head: stages that said READY.
        aborted: whether the old cut serves on.
        reason: why it was aborted; who, and what.
        predicted_ms: head: what the decision expected to gain per token.
    """

    node: int
    seq: int
    epoch: int
    decision: str
    barrier_ms: float
    aborted: bool
    prestage_ms: float | None = None
    commit_ms: float | None = None
    drain_ms: float | None = None
    n_acks: int | None = None
    reason: str | None = None
    predicted_ms: float | None = None


class Migration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="record", tag="migration"):
    """What one node gave or received when blocks moved.

    Attributes:
        node: the node.
        peer: the neighbour at the other side.
        role: ``donor`` or ``receiver``.
        epoch: that the move brought.
        blocks: indices of the blocks that moved.
        weight_construct_ms: receiver: building the modules without weights.
        weight_read_ms: receiver: reading the tensors.
        weight_pack_ms: receiver: packing them for its engine; 0 where that takes them as they are.
        page_cache_warm: receiver: whether the files' pages were in memory already.
        pack_ms: donor: putting keys and values into frames.
        kv_bytes: of keys and values that moved, all sessions.
        kv_tokens: rows that moved, over sessions and blocks.
        kv_ms: sending or receiving them, waiting for the peer included: an upper bound, not a bandwidth.
        background_bytes: the part of ``kv_bytes`` that moved while tokens flowed.
        commit_ms: from COMMIT to DONE.
        release_ms: donor: giving the memory back.
        pause_ms: from the node's last step under the old cut to its first under the new one.
    """

    node: int
    peer: int
    role: str
    epoch: int
    blocks: list[int]
    kv_bytes: int
    kv_tokens: int
    kv_ms: float
    background_bytes: int
    commit_ms: float
    pause_ms: float | None = None
    weight_construct_ms: float | None = None
    weight_read_ms: float | None = None
    weight_pack_ms: float | None = None
    page_cache_warm: bool | None = None
    pack_ms: float | None = None
    release_ms: float | None = None


Record = Step | StageMeta | Session | Final | Window | Migration
"""Any record."""
