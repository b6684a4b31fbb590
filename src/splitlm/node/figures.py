"""What a party's part in a run costs: bytes and frames of each lane, copies, buffers, graphs, and where time goes."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from splitlm.finetune.crossing import Crossing
from splitlm.finetune.engine import Engine
from splitlm.finetune.plane import Plane
from splitlm.node.partylinks import PartyLinks

_log = logging.getLogger("splitlm.train")


def figures(engine: Engine, plane: Plane, links: PartyLinks, crossing: Crossing) -> dict[str, float]:
    """All so far, by name. Seconds end in ``_s``; ``h2d`` and ``d2h`` are copies to a device and back."""
    found: dict[str, float] = {}
    for lane, counts in plane.counts.items():
        found |= {f"{lane}_{name}": value for name, value in vars(counts).items()}
    state_in, state_out = links.state_bytes
    found |= {"state_bytes_in": state_in, "state_bytes_out": state_out}
    found |= {"h2d_s": crossing.copies.to_device, "d2h_s": crossing.copies.from_device}
    allocations, reuses = links.pool_counts
    found |= {"pool_allocations": allocations, "pool_reuses": reuses, "peak_live": engine.peak_live}
    return found | {"compute_s": engine.compute_s, "wait_s": engine.wait_s}


def log_figures(found: Mapping[str, float]) -> None:
    """Write them to this process's log, at its end."""
    for lane in ("activation", "gradient"):
        _log.info(
            "%s lane: %d frames, %d bytes in; %d frames, %d bytes out",
            lane,
            *(found[f"{lane}_{what}_{way}"] for way in ("in", "out") for what in ("frames", "bytes")),
        )
    _log.info("state lane: %d bytes in, %d bytes out", found["state_bytes_in"], found["state_bytes_out"])
    _log.info("copies to the device %.3f s, back %.3f s", found["h2d_s"], found["d2h_s"])
    _log.info("receive pools: %d allocations, %d reuses", found["pool_allocations"], found["pool_reuses"])
    _log.info("most graphs kept at once: %d", found["peak_live"])
    _log.info("computing %.3f s, waiting for neighbours %.3f s", found["compute_s"], found["wait_s"])
