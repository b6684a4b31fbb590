"""``splitlm.train``: a training run from Python; the command line is thin over it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from splitlm.core.config import RunConfig, resolved
from splitlm.core.errors import UsageError
from splitlm.finetune.objective import Objectives
from splitlm.finetune.output import ADAPTER, MODEL
from splitlm.finetune.runfile import read_run, run_folder
from splitlm.localtrain import LocalSettings, coordinate, train_here
from splitlm.model.source import resolve
from splitlm.node.trainlead import LeadSettings
from splitlm.node.trainroom import train_in_room
from splitlm.telemetry.train_summary import TrainRows, TrainSummary

Say = Callable[[str], None]
Record = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class TrainRun:
    """A run that is over.

    Attributes:
        folder: of the run.
        output: the model or the adapter that it made; None where ``server.parameters.save`` is off.
        summary: in numbers.
    """

    folder: Path
    output: Path | None
    summary: TrainSummary


def train(
    config: str | Path | Mapping[str, object] | RunConfig,
    *,
    local: bool = True,
    objectives: Objectives | None = None,
    folder: str | Path | None = None,
    resume: str | Path | None = None,
    changes: Sequence[str] = (),
    threads: int = 1,
    deadline_s: float = 60.0,
    listen: tuple[str, int] = ("127.0.0.1", 0),
    advertise: str = "",
    token: str = "",
    opened: Callable[[int], None] = lambda _: None,
    say: Say = lambda _: None,
    record: Record = lambda _, __: None,
) -> TrainRun:
    """Fine-tune a model that is cut between owners of data and workers, until the run is over.

    Args:
        config: a file of settings, what such a file holds, or settings that were read (``finetune.runfile.read_run``).
        local: all roles on this machine, as processes. False: be the coordinator alone; parties join with
            ``splitlm client``.
        objectives: a table with entries of one's own (``register_objective``). They are functions of this process and
            travel to no other, so all roles then run in this one, on one compute thread; for ``local`` runs only.
        folder: of the run; by default a new one below ``log_path``.
        resume: the folder of an earlier run of these settings, to go on with from its last complete round.
        changes: ``a.b=c`` each, over what ``config`` says.
        threads: intra-op threads of each party.
        deadline_s: how long to wait for parties.
        listen: address of the coordinator where ``local`` is off; port 0 takes a free one.
        advertise: host at which parties reach it, where that differs.
        token: join secret; a local run draws one.
        opened: told the coordinator's port; 0 where parties meet it at a broker.
        say: takes a line of progress.
        record: takes each row that goes to the run's metrics: its kind, and its values.

    Raises:
        UsageError: a setting is wrong, or the folder cannot be used.
        SplitlmError: the run ended early: a party's trouble, the network's, or a file's.
    """
    if objectives is not None and not local:
        raise UsageError(
            "Objectives of one's own are functions of this process, and parties elsewhere do not know them",
            where="objectives",
            expected="local=True with them",
            remedy="Each party may run a script of its own that calls splitlm.node.party.run_party with the same table",
        )
    file = Path(config) if isinstance(config, str | Path) else None
    settings = config if isinstance(config, RunConfig) else read_run(file or config, changes)  # type: ignore[arg-type]
    new = Path(folder) if folder is not None else None
    place = Path(resume) if resume is not None else run_folder(settings, new)
    rows, began = TrainRows(), [time.perf_counter()]

    def keep(kind: str, row: dict[str, Any]) -> None:
        if kind == "owner":
            began[0] = time.perf_counter()
        rows.add(kind, row)
        record(kind, row)

    lead = LeadSettings(
        settings,
        lambda name, weights: resolve(name, weights=weights, progress=say),
        folder=place,
        resume=resume is not None,
        deadline_s=deadline_s,
        states=(listen[0], 0),
        advertise=advertise,
        token=token or (secrets.token_hex(16) if local else ""),
        objectives=objectives,
        say=say,
        record=keep,
    )
    with _kept(place):
        if objectives is not None:
            asyncio.run(train_in_room(lead, threads))
        elif local:
            given, over = (file, changes) if file is not None else (_written(settings, place), ())
            train_here(lead, LocalSettings(given.resolve(), over, place, threads))
        else:
            asyncio.run(coordinate(lead, listen, opened))
    return TrainRun(place, output_of(place), rows.summary(time.perf_counter() - began[0]))


def output_of(folder: Path) -> Path | None:
    """The model or the adapter in a run's folder; None where there is none."""
    return next((folder / name for name in (MODEL, ADAPTER) if (folder / name).is_dir()), None)


def _written(config: RunConfig, folder: Path) -> Path:
    """Settings that came from no file, for the parties to read."""
    path = folder / "settings.yaml"
    plain = msgspec.to_builtins(resolved(config), enc_hook=str)
    path.write_text(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return path


@contextlib.contextmanager
def _kept(folder: Path) -> Iterator[None]:
    """Of a run that ended before it began, no empty folder stays behind."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise
