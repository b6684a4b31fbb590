"""From a place in a cut to stages that compute: what every node of a ring does first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from splitlm.core.cut import Cut
from splitlm.infer.meter import Meter
from splitlm.infer.relay import Relay
from splitlm.model.compute.choice import choose
from splitlm.model.compute.native.library import prepare
from splitlm.model.compute.paced import PacedEngine
from splitlm.model.compute.products import products
from splitlm.model.load import Loader, ModelFiles
from splitlm.model.stage import Stage, build_stages, resident_bytes
from splitlm.node.settings import StageReport
from splitlm.telemetry.folder import versions
from splitlm.telemetry.memory import peak_rss_bytes
from splitlm.telemetry.record import StageMeta

MIB = 2**20
NOTE_CHARS = 400
UNPACKED = 8
"""How many matrices that could not be packed are named."""


@dataclass(frozen=True)
class BuildSettings:
    """How a node builds its segments (see ``core.messages.Assign``)."""

    loader: Loader = "shard"
    compute: str = "exact"
    threads: int = 0
    pace_ms: float = 0.0


@dataclass
class Built:
    """A node's segments, ready to compute."""

    stages: list[Stage]
    relays: list[Relay]
    meta: StageMeta

    @property
    def note(self) -> str:
        """What the user is to know of the engine; empty where all is as asked."""
        meta, found = self.meta, []
        if meta.asked:
            found.append(f"runs {meta.compute}, since it was asked to run {meta.asked}")
        elif meta.uncompiled:
            found.append(f"computes more slowly than it could: {meta.uncompiled.rstrip('.')}")
        if meta.unpacked:
            count = meta.unpacked_count
            what = "a matrix stays" if count == 1 else f"{count} matrices stay"
            found.append(f"{what} in float32: {meta.unpacked[0]}{', …' * (count > 1)}")
        return "; ".join(found)[:NOTE_CHARS]

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights held."""
        return self.meta.resident_bytes

    def report(self, meter: Meter) -> StageReport:
        """What the head's own node held and did."""
        meta, sums = self.meta, meter.decode
        return StageReport(
            node=meta.node,
            segments=meta.segments,
            resident_bytes=meta.resident_bytes,
            peak_rss_bytes=peak_rss_bytes(),
            import_rss_bytes=int(meta.import_rss_mb * MIB),
            compute_ms=sums.compute_ms,
            wait_ms=sums.recv_wait_ms,
            send_ms=sums.send_ms,
        )


def build_node(files: ModelFiles, cut: Cut, node: int, name: str, settings: BuildSettings) -> Built:
    """Load the segments of one node. Runs on the compute thread.

    Raises:
        CheckpointError: see ``ModelFiles.load``.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)  # here, since a stage learns the number after its thread began
    before = peak_rss_bytes()
    segments = cut.held_by(node)
    choice = choose(settings.compute)
    stages = build_stages(files, segments, loader=settings.loader, compute=choice.kind or choice.name)
    packing = stages[0].packing
    if settings.pace_ms:
        for stage in stages:
            stage.engine = PacedEngine(stage.engine, stage.part, settings.pace_ms)
    timings = {key: sum(stage.part.timings[key] for stage in stages) for key in ("construct", "read", "assign", "pack")}
    seen: dict[int, int] = {}
    packed = sum(p.elements for stage in stages for p in products(stage.part.module))
    for stage in stages:
        for param in stage.part.module.parameters():
            seen[param.data_ptr()] = param.numel()
    meta = StageMeta(
        node=node,
        name=name,
        segments="; ".join(map(str, segments)),
        blocks=[i for segment in segments for i in segment.blocks],
        parameters=packed + sum(seen.values()),
        resident_bytes=resident_bytes(stages),
        dtype=str(files.dtype).removeprefix("torch."),
        device="cpu",
        threads=torch.get_num_threads(),
        compute=stages[0].engine.name,
        asked=f"{settings.compute} ({why})" if (why := choice.why or choice.aside) else "",
        uncompiled=prepare() if packing is not None else "",
        pack_ms=timings["pack"],
        inexact=packing.inexact / packing.numbers if packing is not None and packing.numbers else 0.0,
        unpacked=packing.left[:UNPACKED] if packing is not None else [],
        unpacked_count=len(packing.left) if packing is not None else 0,
        construct_ms=timings["construct"],
        read_ms=timings["read"],
        assign_ms=timings["assign"],
        read_kind="pread" if settings.loader == "shard" else "mmap set-up",
        import_rss_mb=before / MIB,
        versions=versions(),
    )
    return Built(stages, [Relay(stage, cut.epoch) for stage in stages], meta)


def engines_in_words(told: Mapping[int, tuple[str, str]]) -> list[str]:
    """What the user is to know of a ring's engines; nothing where transformers alone runs, as asked.

    Args:
        told: of each node, its engine, and what it has to say of it.
    """
    names = [name for _, (name, _) in sorted(told.items())]
    notes = {note for _, note in told.values()}
    lines = [f"node {node} {note}" for node, (_, note) in sorted(told.items()) if note]
    if len(told) > 1 and len(notes) == 1:
        lines = [f"every node {note}" for note in notes if note]
    if set(names) == {"exact"}:
        return lines
    return [*lines, f"engine: {names[0]}" if len(set(names)) == 1 else f"engines: {' → '.join(names)}"]
