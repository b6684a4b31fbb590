"""What is seen of a training run while it goes on, and what is said of it at its end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from splitlm.cli.console import Console
from splitlm.telemetry.train_summary import TrainRows

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from splitlm.core.config import RunConfig
    from splitlm.telemetry.train_summary import TrainSummary
    from splitlm.training import TrainRun

EVERY_S = 2.0
"""In a pipe, a line for a window comes no more often."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class TrainView:
    """Windows and rounds as they come: a bar on a terminal, lines in a pipe.

    Args:
        voice: what it is said with.
        config: of the run.
    """

    def __init__(self, voice: Console, config: RunConfig) -> None:
        self._voice, self._config = voice, config
        self._rows = TrainRows()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._batches: dict[str, int] = {}
        self._seen: set[tuple[object, ...]] = set()
        self._newest: tuple[int, int] | None = None
        self._before = 0
        self._told = 0.0

    def say(self, text: str) -> None:
        """A line of progress: what happened, or is awaited from now on."""
        if self._bar is None:
            self._voice.say(text)
        else:
            self._bar.console.print(f"· {text}", markup=False)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._voice.done()

    def record(self, kind: str, row: dict[str, Any]) -> None:
        """A row of the run's metrics."""
        self._rows.add(kind, row)
        match kind:
            case "owner":
                self._batches[row["party"]] = row["batches"]
            case "window":
                self._window(row)
            case "round":
                self._told_whole()
                numbers = {name: value for name, value in row.items() if name not in ("round", "windows", "repeated")}
                told = [f"{_word(name)} {_number(value)}" for name, value in numbers.items() if value is not None]
                self._line(f"round {row['round'] + 1} of {self._config.server.global_round}: " + ", ".join(told))
            case _:
                pass

    @property
    def windows(self) -> int:
        """Windows of a round, as the rows of the first one let expect."""
        shape, learning = self._config.shape, self._config.learning
        most = learning.u_shape.microbatches_per_window if shape.agreed else learning.control_count
        each = [-(-batches // most) for batches in self._batches.values()] or [0]
        return max(each) if shape.agreed else sum(each)

    def _window(self, row: dict[str, Any]) -> None:
        """A party stepped; where all step together, that is one window for all, and whole once the next one begins."""
        if not row["party"].startswith("owner"):
            return
        now, agreed = (row["round"], row["window"]), self._config.shape.agreed
        key = now if agreed else (*now, row["party"])
        if key in self._seen:
            return
        if not self._seen:
            self._before = row["round"] * self.windows  # of a run that is gone on with
            self._start()
        if agreed:
            self._told_whole()
            self._newest = now
        self._seen.add(key)
        if not agreed:
            self._progress(row["round"], row["loss"])

    def _told_whole(self) -> None:
        """Tell of the newest window that all stepped in: every owner's part of its loss is known by now."""
        if self._newest is not None:
            self._progress(self._newest[0], self._rows.window_loss(*self._newest))
            self._newest = None

    def _progress(self, round_: int, loss: float | None) -> None:
        text = f"round {round_ + 1}" + (f", loss {_number(loss)}" if loss is not None else "")
        done, total = self._before + len(self._seen), self.windows * self._config.server.global_round
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total or None, description=text)
        elif time.monotonic() - self._told >= EVERY_S:
            self._told = time.monotonic()
            self._line(f"window {done} of {total or '?'}: {text}")

    def _start(self) -> None:
        if self._bar is not None:
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

        # A description has no markup: a party's name could.
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        self._bar = self._voice.progress(*columns, TextColumn("windows"), TimeRemainingColumn())
        if self._bar is not None:
            total = self.windows * self._config.server.global_round
            self._task = self._bar.add_task("", total=total or None, completed=self._before)
            self._bar.start()

    def _line(self, text: str) -> None:
        if self._bar is None:
            self._voice.note(text)
        else:
            self.say(text)


def tell(voice: Console, run: TrainRun, config: RunConfig) -> None:
    """The closing summary, on stdout."""
    found = run.summary
    voice.out(
        f"{_count(found.rounds, 'round')}, {_count(found.windows, 'window')}, {_count(found.samples, 'sample')} "
        f"in {found.seconds:.1f} s ({found.samples_per_s:.1f} samples/s)"
    )
    if found.loss_first is not None and found.loss_last is not None:
        voice.out(f"loss          {_number(found.loss_first)} → {_number(found.loss_last)}")
    for name, value in found.scores.items():
        first = found.scores_first.get(name)
        voice.out(f"{_word(name):<13} " + (f"{_number(first)} → " if first is not None else "") + _number(value))
    if found.repeated or found.lost:
        voice.out(f"{_count(found.repeated, 'window')} done again; lost: {', '.join(found.lost) or 'nobody'}")
    lanes = ", ".join(f"{_word(lane)} {_bytes(sent)}" for lane, sent in found.bytes_by_lane.items())
    voice.out(f"bytes         {lanes}")
    _parts(voice, found)
    voice.out(f"run           {run.folder}")
    if run.output is not None:
        voice.out(f"{run.output.name:<13} {run.output}")
        voice.out(f"\nNext:\n  {next_command(run, config)}")


def next_command(run: TrainRun, config: RunConfig) -> str:
    """What one does with what a run made."""
    adapter = config.fine_tune.name == "LoRA"
    return f"splitlm export {run.folder} --to my-model" + (" --merge" if adapter else "")


def _parts(voice: Console, found: TrainSummary) -> None:
    """Where each party's time went, and what it sent."""
    from splitlm.cli.tables import table

    rows = []
    for part in found.parts:
        whole = max(found.seconds, part.compute_s + part.wait_s, 1e-9)
        shares = [part.compute_s, part.wait_s, whole - part.compute_s - part.wait_s]
        shown = [f"{100 * share / whole:.0f} %" for share in shares]
        rows.append([part.party, *shown, _bytes(sum(part.bytes_out.values())), str(part.peak_live)])
    if rows:
        table(voice, ["party", "computing", "waiting", "the rest", "sent", "graphs"], rows)


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + "s" * (number != 1)


def _word(name: str) -> str:
    return {"activation": "activations", "gradient": "gradients", "state": "states"}.get(name, name.replace("_", " "))


def _number(value: float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _bytes(number: float) -> str:
    unit = 0
    while number >= 1024 and unit < len(_UNITS) - 1:
        number, unit = number / 1024, unit + 1
    return f"{number:.1f} {_UNITS[unit]}" if unit else f"{number:.0f} B"
