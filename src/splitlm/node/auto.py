"""The plan that decides by itself: what windows measure goes to the policy, and its decision to the next boundary."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from splitlm.coordinator.state import Decision, Outcome
from splitlm.core.cut import Cut
from splitlm.core.profile import DeviceProfile, LinkProfile
from splitlm.model.load import ModelFiles
from splitlm.model.profile import model_profile
from splitlm.node.settings import RingSettings
from splitlm.planner import policy
from splitlm.planner.cost import Ring

UNBOUNDED = 2**62
LOCAL_MS, LOCAL_BYTES_PER_S = 0.3, 1e9


def assumed(settings: RingSettings, files: ModelFiles, cut: Cut) -> Ring:
    """A ring of equal devices: what windows measure corrects it, device by device.

    A head costs what reading its weights says; on simulated devices, which take their time per block, nothing.
    """
    model = model_profile(files, settings.model, settings.engines)
    head = 0.0 if any(settings.pace_of(node) for node in range(cut.stages)) else files.head_cost
    names = [f"node {node}" for node in range(cut.stages)]
    devices = tuple(
        DeviceProfile(name=name, measured=model.identity, memory_bytes=UNBOUNDED, block_ms=1.0, head_ms=head)
        for name in names
    )
    links = tuple(
        LinkProfile(source=a, target=b, latency_ms=LOCAL_MS, bytes_per_s=LOCAL_BYTES_PER_S)
        for a, b in zip(names, [*names[1:], names[0]], strict=True)
    )
    tail = cut.segments[-1].count if cut.private else 0
    return Ring(model=model, devices=devices, links=links, private=cut.private, tail_blocks=tail)


@dataclass
class AutoPlan:
    """Moves blocks where the policy finds that it pays within the horizon.

    A decision is announced when the window that led to it has ended, and proposed at the boundary after.

    Args:
        ring: profiles of the model, the devices and the links; only ratios within a device must be right.
        horizon: tokens within which a move must pay.
        sessions: how many decode now.

    Attributes:
        decisions: every decision of the policy, with the milliseconds that deciding took.
    """

    ring: Ring
    horizon: int
    sessions: Callable[[], int]
    settings: policy.Settings = field(default_factory=policy.Settings)
    decisions: list[tuple[policy.Decision, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._state = policy.State()
        self._compute_ms: dict[int, float] = {}
        self._coming: policy.Decision | None = None

    def measured(self, node: int, compute_ms: float) -> None:
        """A node's median compute for one token in the window that just ended; 0 where it computed none."""
        self._compute_ms[node] = compute_ms

    async def announce(self, cut: Cut, boundary: int) -> Cut | None:
        """See ``Plan``."""
        times, self._compute_ms = self._compute_ms, {}
        if self._coming is not None:
            return self._coming.cut
        sessions = self.sessions()
        if boundary == 1 or not sessions or not all(times.get(node, 0.0) > 0 for node in range(cut.stages)):
            return None
        window = policy.Observation(compute_ms=tuple(times[node] for node in range(cut.stages)), sessions=sessions)
        ring = msgspec.structs.replace(self.ring, sessions=sessions)
        started = time.perf_counter()
        # Some milliseconds of arithmetic: not on the loop, which tokens pass.
        self._state, decision = await asyncio.to_thread(
            policy.decide, self._state, ring, cut, window, horizon=self.horizon, settings=self.settings
        )
        self.decisions.append((decision, (time.perf_counter() - started) * 1e3))
        if decision.cut is not None:
            self._coming = decision
        return decision.cut

    def decide(self, cut: Cut, boundary: int) -> Decision:  # noqa: ARG002 - it is what every plan takes
        """See ``Plan``."""
        coming = self._coming
        if coming is None:
            return Decision()
        return Decision("auto", coming.cut, predicted_ms=coming.now_ms - coming.predicted_ms)

    def happened(self, outcome: Outcome) -> None:
        """See ``Plan``."""
        if outcome.decision.cut is not None:
            self._coming = None
            if not outcome.committed:
                self._state = policy.State()
