"""Does a moved block change anything? Every boundary, every size of a move, in one process without sockets.

Each case is a ring of its own that moves blocks in the middle of a text, and is compared with the ring of the same cut
that moves none: same windows, same sums, so every logit must have the same bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from splitlm.check.compare import Comparison, Run, compare
from splitlm.check.equivalence import default_cases, intra_op_threads
from splitlm.check.inmemory import MemoryRing, memory_ring
from splitlm.check.moves import Moves
from splitlm.core.cut import Cut, shift
from splitlm.core.errors import CutError, UsageError
from splitlm.core.shifts import Shift
from splitlm.model.compute.choice import need
from splitlm.model.load import ModelFiles
from splitlm.model.runner import check_threads
from splitlm.model.sizes import ModelShape
from splitlm.model.source import resolve
from splitlm.model.text import TextCodec
from splitlm.node.settings import RingSettings, choose_cut

SIZES = (-2, -1, 1, 2)
Say = Callable[[str], None]


@dataclass(frozen=True)
class Moved:
    """One case.

    Attributes:
        shift: what was asked for.
        at: token at which it happened; 0 when it did not.
        blocks: that moved, ``source`` and ``target`` their nodes.
        kv_bytes: that the receiver installed, and ``due`` those that the formula gives.
        background_bytes: sent while tokens flowed.
        stood_ms: how long the ring stood at that boundary.
        missed: why the move did not happen; empty where it did.
        comparison: with the ring that moved nothing.
    """

    shift: Shift
    at: int
    blocks: tuple[int, ...]
    source: int
    target: int
    kv_bytes: int
    due: int
    background_bytes: int
    stood_ms: float
    missed: str
    comparison: Comparison

    @property
    def failure(self) -> str:
        """What is wrong; empty if nothing is."""
        if self.missed:
            return f"nothing was checked: {self.missed}"
        if self.kv_bytes != self.due:
            return f"{self.kv_bytes} bytes of KV moved, and {self.due} were due"
        if not self.comparison.bit_equal:
            first = next((step for step in self.comparison.steps if not (step.same and step.bit_equal)), None)
            where = f"from index {first.index} on" if first else "in their number"
            return f"tokens or logits differ {where} (max |Δlogit| {self.comparison.delta:.2g})"
        return ""


@dataclass(frozen=True)
class Matrix:
    """The whole check. ``held`` are the segments before a move, in words, by node."""

    held: tuple[str, ...]
    dtype: str
    prompt_tokens: int
    cases: tuple[Moved, ...]

    @property
    def ok(self) -> bool:
        """Whether every case passed; no case is no success."""
        return bool(self.cases) and not any(case.failure for case in self.cases)


def migration(
    model: str,
    *,
    tokens: int = 40,
    shift_at: Sequence[int] = (20,),
    cuts: tuple[int, ...] | None = None,
    stages: int = 3,
    private: bool = False,
    tail_blocks: int = 0,
    family: str = "",
    dtype: str = "auto",
    threads: int = 1,
    prefill_chunk: int = 128,
    prompt: str = "",
    compute: str = "exact",
    say: Say = lambda _: None,
) -> Matrix:
    """Move blocks at every boundary of a cut, by −2, −1, 1 and 2 where that fits, at each of the tokens given.

    Args:
        tokens: generated in each case.
        shift_at: tokens after which blocks move; windows are as long.
        compute: engine of every stage.
        prompt: none takes a short text, or one longer than the model's sliding window.

    Raises:
        UsageError: a token at which nothing can move any more, too many threads, or a cut that does not fit.
        ModelError: the model cannot be loaded.
    """
    for at in shift_at:
        if not 1 <= at < tokens:
            raise UsageError(f"It is {at}", where="--shift-at", expected=f"at least 1, less than {tokens} tokens")
    check_threads(threads)
    need(compute)
    folder = resolve(model, progress=say)
    files, codec = ModelFiles(folder, family=family, dtype=dtype), TextCodec(folder)
    cut = choose_cut(files, RingSettings(model, folder, stages, cuts or None, private, tail_blocks))
    possible = [Shift(at, s, k) for at in shift_at for s in range(1, cut.stages) for k in SIZES if _fits(cut, s, k)]
    if not possible:
        raise CutError("No block of this cut can move", expected="a stage with a block to spare", where="--cuts")
    sliding = any(window is not None for window in files.windows)
    ids = codec.encode(prompt) if prompt else default_cases(codec, files, prefill_chunk, tokens)[sliding].prompt
    shape = ModelShape(folder, dtype=files.dtype, family=family)
    with intra_op_threads(threads):
        cases = asyncio.run(_cases(files, shape, cut, possible, tuple(ids), tokens, prefill_chunk, compute, say))
    held = tuple("; ".join(map(str, cut.held_by(node))) for node in range(cut.stages))
    return Matrix(held, str(files.dtype).removeprefix("torch."), len(ids), tuple(cases))


def _fits(cut: Cut, boundary: int, k: int) -> bool:
    try:
        shift(cut, boundary, k)
    except CutError:
        return False
    return True


async def _cases(
    files: ModelFiles,
    shape: ModelShape,
    cut: Cut,
    possible: Sequence[Shift],
    prompt: tuple[int, ...],
    tokens: int,
    chunk: int,
    compute: str,
    say: Say,
) -> list[Moved]:
    unmoved: dict[int, Run] = {}
    cases = []
    for i, asked in enumerate(possible, start=1):
        say(f"case {i} of {len(possible)}")
        if asked.at not in unmoved:
            async with memory_ring(files, cut, window=asked.at, prefill_chunk=chunk, compute=[compute]) as ring:
                unmoved[asked.at] = await ring.run(prompt, tokens)
        async with memory_ring(
            files, cut, window=asked.at, shifts=[asked], prefill_chunk=chunk, compute=[compute]
        ) as ring:
            made = await ring.run(prompt, tokens)
            cases.append(_case(ring, asked, made, unmoved[asked.at], shape, len(prompt)))
    return cases


def _case(ring: MemoryRing, asked: Shift, made: Run, unmoved: Run, shape: ModelShape, prompt_tokens: int) -> Moved:
    for node in ring.nodes:
        node.work.flush()
    boundary = next((b for b in ring.boundaries if b.moves), None)
    moves = boundary.moves if boundary else ()
    sides = ring.migrations
    at = boundary.laps if boundary else 0
    return Moved(
        asked,
        at,
        tuple(move.block for move in moves),
        moves[0].source if moves else 0,
        moves[0].target if moves else 0,
        sum(side.kv_bytes for side in sides if side.role == "receiver"),
        kv_due(shape, [move.block for move in moves], prompt_tokens + at - 1),
        sum(side.background_bytes for side in sides if side.role == "donor"),
        boundary.stood_ms if boundary else 0.0,
        "" if boundary else Moves((asked,), tuple(ring.boundaries), tuple(sides)).failure,
        compare(made, unmoved, str(shape.dtype).removeprefix("torch.")),
    )


def kv_due(shape: ModelShape, blocks: Sequence[int], seen: int) -> int:
    """Bytes of keys and values that these blocks keep of so many tokens: at most ``window − 1`` of them if sliding."""
    windows = [shape.windows[block] for block in blocks]
    return shape.row_bytes * sum(seen if window is None else min(seen, window - 1) for window in windows)
