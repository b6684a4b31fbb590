"""What a figure is, and how figures are shown. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Literal

import msgspec


class Goal(msgspec.Struct, frozen=True):
    """A bound that a figure is to reach, and one that would be better still."""

    sense: Literal[">=", "<="]
    reach: float
    stretch: float | None = None

    def reached(self, value: float) -> bool:
        """Whether a value is on the right side of the bound."""
        return value >= self.reach if self.sense == ">=" else value <= self.reach

    def __str__(self) -> str:
        sign = "≥" if self.sense == ">=" else "≤"
        return f"{sign} {self.reach:g}" + (f" ({self.stretch:g})" if self.stretch is not None else "")


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured figure.

    Attributes:
        name: short and stable, such as ``stream``.
        text: what was divided by what.
        unit: ``×`` for a ratio, ``ms`` for a time, ``%`` for a share, empty for a count.
        value: median over the repetitions.
        low: the least value seen.
        high: the largest value seen.
        count: repetitions, or samples; 0 where nothing was measured, and ``note`` says why.
        goal: None where the figure only informs.
        note: what belongs beside it.
    """

    name: str
    text: str
    value: float
    low: float
    high: float
    count: int
    unit: str = "×"
    goal: Goal | None = None
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the median reaches the goal; None without one, or without a measurement."""
        return None if self.goal is None or not self.count else self.goal.reached(self.value)

    @property
    def shown(self) -> tuple[str, str]:
        """Median with its unit, and the range, as tables show them."""
        if not self.count:
            return "left out", "—"
        return f"{number(self.value)} {self.unit}".rstrip(), f"{number(self.low)}–{number(self.high)}"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of one run, and what they were measured with."""

    bench: str
    settings: dict[str, str | int | float]
    versions: dict[str, str]
    machine: str
    figures: list[Figure]


def figure(
    name: str, text: str, values: Sequence[float], *, unit: str = "×", goal: Goal | None = None, note: str = ""
) -> Figure:
    """A figure from the values of its repetitions (at least one)."""
    return Figure(
        name=name,
        text=text,
        value=median(values),
        low=min(values),
        high=max(values),
        count=len(values),
        unit=unit,
        goal=goal,
        note=note,
    )


def left_out(name: str, text: str, why: str, *, unit: str = "×") -> Figure:
    """A figure that cannot be measured here, and why."""
    return Figure(name=name, text=text, value=0.0, low=0.0, high=0.0, count=0, unit=unit, note=why)


def ratios(samples: Mapping[str, Sequence[float]], over: str, under: str) -> list[float]:
    """``over ÷ under`` per repetition: both sides of each were measured one right after the other."""
    return [a / b for a, b in zip(samples[over], samples[under], strict=True)]


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == 0:
        return "0"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) >= 1 else f"{value:.3f}"


def _verdict(reached: bool | None) -> str:
    return "" if reached is None else "reached" if reached else "not reached"


def table(figures: Sequence[Figure]) -> str:
    """Figures as plain text, one line each, notes below their line."""
    rows = [("figure", "median", "min–max", "n", "goal", "", "what")]
    rows += [
        (
            f.name,
            *f.shown,
            str(f.count),
            str(f.goal or "—"),
            _verdict(f.reached),
            f.text,
        )
        for f in figures
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = []
    for row, note in zip(rows, ["", *(f.note for f in figures)], strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
        if note:
            lines.append(f"    {note}")
    return "\n".join(lines)


def markdown(figures: Sequence[Figure]) -> str:
    """Figures as a Markdown table."""
    lines = ["| figure | median (min–max) | goal | |", "|---|---|---|---|"]
    lines += [
        f"| {f.text} | {f'{f.shown[0]} ({f.shown[1]})' if f.count else f'left out: {f.note}'} "
        f"| {f.goal or '—'} | {_verdict(f.reached)} |"
        for f in figures
    ]
    return "\n".join(lines) + "\n"


def write_json(result: Result) -> bytes:
    """A result as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"


def read_json(data: bytes) -> Result:
    """What ``write_json`` wrote; raises ``msgspec.ValidationError`` for anything else."""
    return msgspec.json.decode(data, type=Result)
