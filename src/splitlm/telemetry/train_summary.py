"""What the rows of a training run add up to. Pure: rows in, numbers out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

LANES = ("activation", "gradient", "state")
_OF_A_ROUND = ("round", "windows", "repeated", "samples", "loss")


class Part(msgspec.Struct, frozen=True):
    """One party's part, over the whole run.

    Attributes:
        party: role and number.
        bytes_out: bytes that it sent, by lane.
        bytes_in: bytes that came to it, by lane.
        compute_s: seconds of forwards and backwards.
        wait_s: seconds in which it had nothing to compute.
        peak_live: most graphs that it kept at once.
    """

    party: str
    bytes_out: dict[str, int]
    bytes_in: dict[str, int]
    compute_s: float
    wait_s: float
    peak_live: int


class TrainSummary(msgspec.Struct, frozen=True):
    """A run in numbers.

    Attributes:
        rounds: that were completed.
        windows: that were stepped in them; 0 where nothing is agreed.
        repeated: windows that were done again.
        samples: rows that were learnt from, each as often as it was.
        loss_first: mean loss of the first round, or of the first window where there was one round.
        loss_last: the same of the last one.
        scores: of validation after the last round, by name.
        scores_first: the same after the first one.
        seconds: from the first party's coming to the end.
        samples_per_s: over these.
        bytes_by_lane: what all parties sent and what came to them from the aggregator.
        parts: of each party.
        lost: parties that were lost on the way.
    """

    rounds: int
    windows: int
    repeated: int
    samples: int
    loss_first: float | None
    loss_last: float | None
    scores: dict[str, float]
    scores_first: dict[str, float]
    seconds: float
    samples_per_s: float
    bytes_by_lane: dict[str, int]
    parts: list[Part]
    lost: list[str]


class TrainRows:
    """Takes rows as a run records them (``coordinator/training``), and adds them up."""

    def __init__(self) -> None:
        self.rounds: list[Mapping[str, Any]] = []
        self.lost: list[str] = []
        self._parties: dict[str, Mapping[str, float]] = {}
        self._windows: dict[tuple[int, int], list[tuple[float, int]]] = {}

    def add(self, kind: str, row: Mapping[str, Any]) -> None:
        """One row; kinds that are not known add nothing."""
        match kind:
            case "round":
                self.rounds.append(dict(row))
            case "lost":
                self.lost.append(str(row["party"]))
            case "party":
                self._parties[str(row["party"])] = {k: v for k, v in row.items() if k not in ("round", "party")}
            case "window" if row.get("loss") is not None:
                of = self._windows.setdefault((int(row["round"]), int(row["window"])), [])
                of.append((float(row["loss"]), int(row["items"])))
            case _:
                pass

    def window_loss(self, round_: int, window: int) -> float | None:
        """Mean loss of a window over all that told of it; None where nobody did."""
        told = self._windows.get((round_, window), [])
        items = sum(count for _, count in told)
        return sum(loss * count for loss, count in told) / items if items else None

    def summary(self, seconds: float) -> TrainSummary:
        """All of it, after so many seconds."""
        losses = [row["loss"] for row in self.rounds if row.get("loss") is not None]
        if len(losses) < 2 and self._windows:
            ends = (min(self._windows), max(self._windows))
            losses = [loss for loss in (self.window_loss(*end) for end in ends) if loss is not None]
        samples = sum(int(row["samples"]) for row in self.rounds)
        parts = [_part(party, values) for party, values in sorted(self._parties.items())]
        lanes = {lane: sum(part.bytes_out[lane] for part in parts) for lane in LANES}
        lanes["state"] += sum(part.bytes_in["state"] for part in parts)
        return TrainSummary(
            rounds=len(self.rounds),
            windows=sum(int(row["windows"]) for row in self.rounds),
            repeated=sum(int(row["repeated"]) for row in self.rounds),
            samples=samples,
            loss_first=losses[0] if losses else None,
            loss_last=losses[-1] if losses else None,
            scores=_scores(self.rounds[-1]) if self.rounds else {},
            scores_first=_scores(self.rounds[0]) if self.rounds else {},
            seconds=seconds,
            samples_per_s=samples / seconds if seconds > 0 else 0.0,
            bytes_by_lane=lanes,
            parts=parts,
            lost=list(self.lost),
        )


def _scores(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name not in _OF_A_ROUND and value is not None}


def _part(party: str, values: Mapping[str, float]) -> Part:
    def of(way: str) -> dict[str, int]:
        return {lane: int(values.get(f"{lane}_bytes_{way}", 0)) for lane in LANES}

    return Part(
        party=party,
        bytes_out=of("out"),
        bytes_in=of("in"),
        compute_s=float(values.get("compute_s", 0.0)),
        wait_s=float(values.get("wait_s", 0.0)),
        peak_live=int(values.get("peak_live", 0)),
    )
