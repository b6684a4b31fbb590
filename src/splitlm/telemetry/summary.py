"""What the records of a run add up to. Pure: records in, numbers out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

import msgspec

from splitlm.telemetry.record import Record, Step


class Spread(msgspec.Struct, frozen=True):
    """A sample of times in milliseconds: how many, their mean, and two percentiles."""

    count: int
    mean: float
    p50: float
    p99: float


class StageTotals(msgspec.Struct, frozen=True, kw_only=True):
    """One stage's decode steps: total milliseconds per phase, and each phase's share of their sum (0 to 1).

    A step that sessions shared counts once in the times.

    Attributes:
        steps: of sessions: one for each token.
        batch: mean number of sessions that shared a step, over these.
        lap_error: see ``lap_errors``.
        lap_error_p50: median over single laps, see ``single_lap_errors``.
        lap_error_p99: 99th percentile over them.
    """

    node: int
    steps: int
    compute_ms: float
    recv_wait_ms: float
    queue_ms: float
    send_ms: float
    compute_share: float
    recv_wait_share: float
    queue_share: float
    send_share: float
    bytes_out: int
    kv_bytes: int
    batch: float = 1.0
    lap_error: float | None = None
    lap_error_p50: float | None = None
    lap_error_p99: float | None = None


class Hop(msgspec.Struct, frozen=True):
    """Times from the end of compute on ``source`` to the start of compute on ``target``, decode only."""

    source: int
    target: int
    ms: Spread


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A run of a ring in numbers.

    Attributes:
        sessions: sessions that got a first token.
        tokens: tokens decoded: laps, so the first token of each session is not among them.
        ttft_ms: time to first token, over sessions.
        tpot_ms: time per output token: the head's laps.
        tokens_per_s: ``tokens`` over the time from the first lap's start to the last lap's end, all sessions together.
        bytes_per_token: bytes that all stages sent in decode steps, per token.
        stages: by node.
        hops: in the order of the ring; empty when the stages do not share a clock.
    """

    sessions: int
    tokens: int
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    tokens_per_s: float | None
    bytes_per_token: float | None
    stages: tuple[StageTotals, ...]
    hops: tuple[Hop, ...]


def perplexity(loss: float) -> float:
    """Of a mean loss per token in nats; infinite above 700."""
    return math.exp(loss) if loss < 700 else math.inf


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile, ``0 ≤ q ≤ 100``: linear between the two nearest ranks (Hyndman and Fan's type 7).

    The value at rank ``(n − 1) · q / 100`` of the sorted sample, counted from 0; what numpy gives by default.

    Raises:
        ValueError: no values, or q out of range.
    """
    if not values or not 0 <= q <= 100:
        raise ValueError(f"percentile {q} of {len(values)} values")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * q / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def spread(values: Sequence[float]) -> Spread | None:
    """Count, mean, median and 99th percentile; None of no values."""
    if not values:
        return None
    return Spread(len(values), sum(values) / len(values), percentile(values, 50), percentile(values, 99))


def hop_times(steps: Iterable[Step]) -> dict[tuple[int, int], list[float]]:
    """Milliseconds of every hop, by (source node, target node), in the order of the ring.

    A hop runs from the end of one segment's compute to the start of the next's, for the same session and position; the
    way home runs from the last segment at position p to the first at the position that follows, where that is a decode
    step. Only hops of decode steps and of the first token's way home are counted, and none inside one node. Stages on
    different machines have different clocks: do not mix them.
    """
    visits: dict[tuple[int, int], list[Step]] = defaultdict(list)
    for step in steps:
        visits[step.session, step.position].append(step)
    hops: dict[tuple[int, int], list[float]] = defaultdict(list)
    for lap in visits.values():
        lap.sort(key=_segment)
    last = max((_segment(lap[-1]) for lap in visits.values()), default=0)

    def add(a: Step, b: Step) -> None:
        if a.node != b.node:
            hops[a.node, b.node].append((b.start_ns - a.end_ns) / 1e6)

    for (session, position), lap in sorted(visits.items()):
        if not lap[0].prefill:
            for a, b in pairwise(lap):
                if _segment(b) == _segment(a) + 1:
                    add(a, b)
        after = visits.get((session, position + lap[-1].count), [])
        if after and not after[0].prefill and _segment(lap[-1]) == last and _segment(after[0]) == 0:
            add(lap[-1], after[0])
    return dict(sorted(hops.items()))


def lap_errors(steps: Iterable[Step]) -> dict[int, float]:
    """How far each node's own account of its laps is from the head's, as a share of it, by node.

    Over a session's laps together, ``|Σ(recv_wait + queue + compute + send) − Σ tpot| / Σ tpot``, where a node that
    holds two segments adds both: one lap's wait may be counted with its neighbour's, but nothing may be missing. The
    median over sessions. Meaningful with one session at a time: with more, a stage serves several within one lap.
    """
    told: dict[int, float] = defaultdict(float)
    own: dict[tuple[int, int], float] = defaultdict(float)
    for session, tpot, nodes in _accounts(steps):
        told[session] += tpot
        for node, total in nodes.items():
            own[node, session] += total
    errors: dict[int, list[float]] = defaultdict(list)
    for (node, session), total in own.items():
        errors[node].append(abs(total - told[session]) / told[session])
    return {node: median(values) for node, values in sorted(errors.items())}


def single_lap_errors(steps: Iterable[Step]) -> dict[int, list[float]]:
    """The same of every lap by itself, ``|recv_wait + queue + compute + send − tpot| / tpot``: a sample by node.

    A wait counts with the step that ends it. On the head that is the step after the lap in which it waited, and a stage
    does not know when a lap begins: so this holds how much laps differ from their neighbours too.
    """
    errors: dict[int, list[float]] = defaultdict(list)
    for _, tpot, nodes in _accounts(steps):
        for node, total in nodes.items():
            errors[node].append(abs(total - tpot) / tpot)
    return dict(sorted(errors.items()))


def _accounts(steps: Iterable[Step]) -> list[tuple[int, float, dict[int, float]]]:
    """Of every lap its session, what the head says it took, and what each node's phases add up to (milliseconds)."""
    sums: dict[tuple[int, int], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    laps: dict[tuple[int, int], float] = {}
    for step in steps:
        key = step.session, step.position
        sums[key][step.node] += step.recv_wait_ms + step.queue_ms + step.compute_ms + step.send_ms
        if step.tpot_ms:
            laps[key] = step.tpot_ms
    return [(key[0], tpot, sums[key]) for key, tpot in laps.items()]


def summarize(records: Iterable[Record], *, one_clock: bool = True) -> Summary:
    """Add up the records of all stages of one run.

    Args:
        records: of all nodes, in any order.
        one_clock: whether all stages ran on one machine; if not, hops are left out.
    """
    steps = [record for record in records if isinstance(record, Step)]
    decode = [step for step in steps if not step.prefill]
    laps = [(step, step.tpot_ms) for step in decode if step.tpot_ms is not None]
    ttft = [step.ttft_ms for step in steps if step.ttft_ms is not None]
    rate = None
    if laps:
        begin = min(step.start_ns for step, _ in laps)
        end = max(step.start_ns + tpot * 1e6 for step, tpot in laps)
        rate = len(laps) / ((end - begin) / 1e9) if end > begin else None
    errors, singles = lap_errors(decode), single_lap_errors(decode)
    hops = [(key, spread(values)) for key, values in hop_times(steps).items()] if one_clock else []
    return Summary(
        sessions=len(ttft),
        tokens=len(laps),
        ttft_ms=spread(ttft),
        tpot_ms=spread([tpot for _, tpot in laps]),
        tokens_per_s=rate,
        bytes_per_token=sum(step.bytes_out for step in decode) / len(laps) if laps else None,
        stages=tuple(
            _stage(node, [step for step in decode if step.node == node], errors.get(node), singles.get(node, []))
            for node in sorted({step.node for step in steps})
        ),
        hops=tuple(Hop(a, b, ms) for (a, b), ms in hops if ms is not None),
    )


def _segment(step: Step) -> int:
    return step.node if step.segment is None else step.segment


def _stage(node: int, steps: Sequence[Step], lap_error: float | None, singles: Sequence[float]) -> StageTotals:
    compute = sum(step.compute_ms / step.batch for step in steps)
    wait = sum(step.recv_wait_ms / step.batch for step in steps)
    queue = sum(step.queue_ms / step.batch for step in steps)
    send = sum(step.send_ms / step.batch for step in steps)
    total = compute + wait + queue + send or 1.0
    return StageTotals(
        node=node,
        steps=len(steps),
        compute_ms=compute,
        recv_wait_ms=wait,
        queue_ms=queue,
        send_ms=send,
        compute_share=compute / total,
        recv_wait_share=wait / total,
        queue_share=queue / total,
        send_share=send / total,
        bytes_out=sum(step.bytes_out for step in steps),
        kv_bytes=max((step.kv_bytes for step in steps), default=0),
        batch=sum(step.batch for step in steps) / len(steps) if steps else 1.0,
        lap_error=lap_error,
        lap_error_p50=percentile(singles, 50) if singles else None,
        lap_error_p99=percentile(singles, 99) if singles else None,
    )
