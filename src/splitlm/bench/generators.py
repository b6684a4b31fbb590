"""Arms that make tokens: a ring, our uncut loop, and transformers' own ``generate``."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from splitlm.bench.comparison import PROMPT_TOKENS
from splitlm.bench.residency import stage_shares
from splitlm.core.cut import make_cut
from splitlm.core.shifts import Shift
from splitlm.local import Ring
from splitlm.model.compute.choice import choose
from splitlm.model.load import ModelFiles
from splitlm.model.stage import Stage, build_stages
from splitlm.model.stock import Stock
from splitlm.model.uncut import Uncut
from splitlm.telemetry.record import Record, Step
from splitlm.telemetry.sinks import read_trace
from splitlm.telemetry.summary import hop_times, lap_errors, percentile, single_lap_errors

PREFILL_CHUNK = 128


def prompt(session: int = 0, length: int = PROMPT_TOKENS) -> list[int]:
    """The same few token ids for every arm, others for every session."""
    return [3 + session + i for i in range(length)]


def pin(pid: int, core: int) -> None:
    """Keep every thread of a process on one core."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(int(thread.name), {core})


class RingWork:
    """A ring whose head is this process.

    Args:
        pins: core of each stage, the head's first.
        trace: folder of its traces, "" for none.
        shifts: moves, each as token, boundary and blocks.
        given: of ``splitlm.Ring``.
    """

    def __init__(
        self, *, pins: list[int] | None = None, trace: str = "", shifts: Sequence[Sequence[int]] = (), **given: Any
    ) -> None:
        self._trace = Path(trace) if trace else None
        self._ring = Ring(threads=1, trace_dir=self._trace, shifts=[Shift(*asked) for asked in shifts], **given)
        self._ring.open()
        self._files = self._ring.files
        if pins is not None:
            for pid, core in zip([os.getpid(), *self._ring.stage_pids], pins, strict=True):
                pin(pid, core)
        self.told: dict[str, Any] = {"cuts": list(self._ring.cut.boundaries)}

    def run(self, *, tokens: int, sessions: int = 1, prompt_tokens: int = PROMPT_TOKENS) -> dict[str, Any]:
        """Generate in so many sessions at once."""

        def one(session: int) -> None:
            self._ring.generate(prompt(session, prompt_tokens), max_new_tokens=tokens, ignore_eos=True)

        begin = time.perf_counter()
        with ThreadPoolExecutor(sessions) as pool:
            list(pool.map(one, range(sessions)))
        return {"tokens": tokens * sessions, "seconds": time.perf_counter() - begin}

    def windows(self) -> dict[str, Any]:
        """How many windows have ended, and the moves among them: boundary, why, and how many blocks."""
        ended = self._ring.boundaries
        return {
            "ended": len(ended),
            "moves": [[b.number, b.outcome.decision.kind, len(b.moves)] for b in ended if b.moves],
            "cuts": list(self._ring.cut.boundaries),
        }

    def finish(self) -> dict[str, Any]:
        """Close the ring and read its traces (of runs with one session): hops, laps, each stage's compute, memory."""
        self._ring.close()
        records: list[Record] = []
        for path in sorted((self._trace or Path()).glob("trace-node*.jsonl")):
            records += read_trace(path)
        steps = [record for record in records if isinstance(record, Step)]
        decode = [step for step in steps if not step.prefill]
        hops = [ms for values in hop_times(steps).values() for ms in values]
        nodes = sorted({step.node for step in decode})
        return {
            "hops": [percentile(hops, q) for q in (50, 90)] + [len(hops)] if hops else [],
            "each_hop": {f"{a}→{b}": percentile(v, 50) for (a, b), v in hop_times(steps).items() if v},
            "lap_errors": {str(node): error for node, error in lap_errors(decode).items()},
            "single_laps": {
                str(node): [percentile(errors, q) for q in (50, 99)]
                for node, errors in single_lap_errors(decode).items()
            },
            "compute": {str(n): percentile([s.compute_ms for s in decode if s.node == n], 50) for n in nodes},
            "memory": stage_shares(self._files, records, PREFILL_CHUNK),
        }

    def close(self) -> None:
        """Stop the stages."""
        self._ring.close()


def whole_stage(model: str, dtype: str, compute: str) -> tuple[ModelFiles, Stage]:
    """Our stage over all blocks, and its files; one thread from now on."""
    torch.set_num_threads(1)
    files = ModelFiles(Path(model), dtype=dtype)
    (stage,) = build_stages(files, make_cut(files.blocks, ()).segments, compute=choose(compute).name)
    return files, stage


class UncutWork:
    """The whole model in this process, our loader and loop.

    Args:
        model: its folder.
    """

    def __init__(self, *, model: str, dtype: str = "auto", compute: str = "exact") -> None:
        files, stage = whole_stage(model, dtype, compute)
        self._uncut = Uncut(files, stage=stage)
        self.told: dict[str, Any] = {"engine": stage.engine.name}

    def run(self, *, tokens: int) -> dict[str, Any]:
        """Generate once."""
        begin = time.perf_counter()
        made = sum(1 for _ in self._uncut.generate(prompt(), tokens, prefill_chunk=PREFILL_CHUNK))
        return {"tokens": made, "seconds": time.perf_counter() - begin}

    def close(self) -> None:
        """Nothing to do."""


class TransformersWork:
    """``generate`` of transformers, greedy with a KV cache: what the user has without us."""

    def __init__(self, *, model: str, dtype: str = "auto") -> None:
        torch.set_num_threads(1)
        self._stock = Stock(ModelFiles(Path(model), dtype=dtype))
        self.told: dict[str, Any] = {}

    def run(self, *, tokens: int, sessions: int = 1) -> dict[str, Any]:
        """Generate from so many prompts, as one batch."""
        begin = time.perf_counter()
        made = sum(map(len, self._stock.generate_many([prompt(session) for session in range(sessions)], tokens)))
        return {"tokens": made, "seconds": time.perf_counter() - begin}

    def close(self) -> None:
        """Nothing to do."""
