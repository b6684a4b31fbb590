"""What a ring is asked to be, and what it reports when it is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Protocol, get_args

from splitlm.coordinator.coordinator import CTRL_TIMEOUT_S
from splitlm.core.cut import Cut, balanced_boundaries, make_cut
from splitlm.core.engines import ENGINES
from splitlm.core.errors import UsageError
from splitlm.core.shifts import Shift
from splitlm.model.load import Loader
from splitlm.model.runner import check_threads

PLANS = ("noop", "auto")


def silence(ctrl_timeout_s: float) -> float:
    """Seconds of silence on the control plane after which a node counts as lost: longer than any barrier waits."""
    return 2 * ctrl_timeout_s


@dataclass(frozen=True)
class RingSettings:
    """What a ring is to be.

    Attributes:
        model: hub id, directory or well-known name; ``folder`` is where it lies here.
        stages: number of nodes, the head included; ignored where ``cuts`` are given.
        cuts: block boundaries, None for balanced ones.
        private: final norm and head on the head's node too, with ``tail_blocks`` final blocks.
        static: the stages' places come from their own flags; the head holds blocks ``[0, static)``.
        listen: address of the control port; port 0 takes a free one.
        data: address for the last node's link; an empty host is that of ``listen``.
        send: address of node 1, where places are static.
        tls: folder with the head's certificate (``wire.tls``); None leaves all links plain.
        deadline_s: how long to wait for stages, and stages for each other.
        ctrl_timeout_s: how long a barrier waits for a stage; see ``silence`` for when a silent one counts as lost.
        trace_dir: where records go; None turns them off.
        pace_ms: least time per block, for simulated devices: one for all, or one for each node.
        window: laps between two barriers; 0 for none.
        shifts: moves of blocks that are asked for.
        plan: ``auto`` moves blocks where measured times say that it pays; ``noop`` leaves them but for ``shifts``.
        horizon: tokens within which a move of the plan ``auto`` must pay.
        background: bring their blocks while tokens flow; False does it within the barrier (for comparisons).

    Raises:
        UsageError: a value out of range, or a loader or engine that there is not. The cut is checked with the model.
    """

    model: str
    folder: Path
    stages: int = 1
    cuts: tuple[int, ...] | None = None
    private: bool = False
    tail_blocks: int = 0
    static: int | None = None
    family: str = ""
    loader: Loader = "shard"
    dtype: str = "auto"
    compute: str | tuple[str, ...] = "exact"
    threads: int = 0
    pace_ms: float | tuple[float, ...] = 0.0
    prefill_chunk: int = 128
    token: str = ""
    listen: tuple[str, int] = ("127.0.0.1", 0)
    data: tuple[str, int] = ("", 0)
    send: tuple[str, int] = ("", 0)
    tls: Path | None = None
    deadline_s: float = 60.0
    ctrl_timeout_s: float = CTRL_TIMEOUT_S
    trace_dir: Path | None = None
    window: int = 20
    shifts: tuple[Shift, ...] = ()
    background: bool = True
    plan: str = "noop"
    horizon: int = 1000

    def pace_of(self, node: int) -> float:
        """The pace of one node's simulated device."""
        return self.pace_ms[node % len(self.pace_ms)] if isinstance(self.pace_ms, tuple) else self.pace_ms

    @property
    def engines(self) -> str:
        """Every engine that is asked for, in words."""
        return self.compute if isinstance(self.compute, str) else ",".join(self.compute)

    def compute_of(self, node: int) -> str:
        """The engine that one node is asked to run."""
        return self.compute[node % len(self.compute)] if isinstance(self.compute, tuple) else self.compute

    def __post_init__(self) -> None:
        paces = self.pace_ms if isinstance(self.pace_ms, tuple) else (self.pace_ms,)
        computes = self.compute if isinstance(self.compute, tuple) else (self.compute,)
        rules: list[tuple[str, object, bool, str]] = [
            ("loader", self.loader, self.loader in get_args(Loader), " or ".join(get_args(Loader))),
            ("compute", self.compute, bool(computes) and set(computes) <= set(ENGINES), " or ".join(ENGINES)),
            ("pace_ms", self.pace_ms, all(0 <= ms < inf for ms in paces), "0 (off) or more"),
            ("prefill_chunk", self.prefill_chunk, self.prefill_chunk >= 1, "at least 1"),
            ("deadline_s", self.deadline_s, 0 < self.deadline_s < inf, "a positive number of seconds"),
            ("ctrl_timeout_s", self.ctrl_timeout_s, 0 < self.ctrl_timeout_s < inf, "a positive number of seconds"),
        ]
        for name, value, good, expected in rules:
            if not good:
                raise UsageError(f"{name} is {value!r}", expected=expected)
        check_threads(self.threads)
        self._check_windows()

    def _check_windows(self) -> None:
        if self.plan not in PLANS:
            raise UsageError(f"{self.plan!r} is no plan", where="--plan", expected=", ".join(PLANS))
        if self.plan == "auto" and (self.shifts or not self.window):
            raise UsageError(
                "The plan auto decides itself, between windows",
                where="--plan auto",
                expected="a --window of at least 1 and no --shift-at",
            )
        if self.horizon < 1:
            raise UsageError(f"It is {self.horizon}", where="--horizon", expected="tokens, at least 1")
        if self.window < 0:
            raise UsageError(
                f"It is {self.window}", where="--window", expected="tokens between barriers, or 0 for none"
            )
        if self.shifts and not self.window:
            raise UsageError(
                "Blocks move between two windows, and there are none", where="--window 0", expected="at least 1"
            )
        for asked in self.shifts:
            if asked.at < 1:
                raise UsageError(f"It is {asked.at}", where="--shift-at", expected="a token, counted from 1")


@dataclass(frozen=True)
class Place:
    """A place that the user fixed: blocks ``[begin, end)``, the own data address, and the next node's."""

    begin: int
    end: int
    listen: tuple[str, int]
    send: tuple[str, int]


@dataclass(frozen=True)
class StageSettings:
    """What a stage is told by its user; the rest it learns from the head.

    Attributes:
        head: address of the head's control port.
        resolve: finds a model's folder by the name that the head (or the user) gives.
        model: own name of the model, where the head's means nothing on this machine.
        token: join secret.
        deadline_s: how long to wait for the head, and for neighbours.
        ctrl_timeout_s: the head counts as lost after twice this (``silence``).
        tls: folder with this node's certificate (``wire.tls``); None leaves all links plain.
        parent: the process that started this one for its own ring, which has no use without it; 0 for none.
        listen: address for the data listener; an empty host means the one that faces the head.
        advertise: host that the previous node can reach, where it is not the one the head sees.
        threads: intra-op threads; 0 takes the head's word.
        place: a fixed place.
        trace_dir: where records go; None turns them off.
        say: takes one line of progress.

    Raises:
        UsageError: too many threads.
    """

    head: tuple[str, int]
    resolve: Callable[[str], Path]
    model: str = ""
    token: str = ""
    deadline_s: float = 60.0
    ctrl_timeout_s: float = CTRL_TIMEOUT_S
    tls: Path | None = None
    parent: int = 0
    listen: tuple[str, int] = ("", 0)
    advertise: str = ""
    threads: int = 0
    place: Place | None = None
    trace_dir: Path | None = None
    say: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        check_threads(self.threads)


@dataclass
class StageReport:
    """What one node of a finished ring held and did (decode steps only)."""

    node: int
    segments: str
    resident_bytes: int
    peak_rss_bytes: int
    import_rss_bytes: int
    compute_ms: float
    wait_ms: float
    send_ms: float


class Divisible(Protocol):
    """What must be known of a model to cut it."""

    @property
    def blocks(self) -> int:
        """Number of blocks."""

    @property
    def head_cost(self) -> float:
        """What the head reads per token, in blocks."""


def choose_cut(files: Divisible, settings: RingSettings) -> Cut:
    """The cut that the settings ask for.

    Raises:
        CutError: it does not fit the model.
    """
    if settings.cuts is not None:
        return make_cut(files.blocks, settings.cuts, private=settings.private, tail_blocks=settings.tail_blocks)
    edges = balanced_boundaries(
        files.blocks,
        settings.stages,
        head_cost=files.head_cost,
        private=settings.private,
        tail_blocks=settings.tail_blocks,
    )
    return make_cut(files.blocks, edges, private=settings.private, tail_blocks=settings.tail_blocks)
