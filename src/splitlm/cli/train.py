"""``splitlm train``, ``coordinator`` and ``client``: fine-tune where the data lives."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splitlm.cli import options as o
from splitlm.cli.console import Console, console
from splitlm.cli.interrupts import held
from splitlm.core.errors import UsageError

if TYPE_CHECKING:
    from splitlm.core.config import RunConfig

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The file of settings (YAML).")]
Changes = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a setting: a.b=c.")]
JoinSecret = o.TokenFile


def read_config(path: Path, changes: list[str]) -> RunConfig:
    """The settings of a run, checked; relative paths count from the file's folder.

    Raises:
        UsageError: the file is not there, is not YAML, or a setting is wrong.
    """
    import yaml

    from splitlm.core.config import override, read

    def parse(text: str) -> object:
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UsageError(f"{text!r} is no value ({error})", where="--set", expected="a YAML value") from error

    try:
        mapping = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"The settings cannot be read ({getattr(error, 'strerror', None) or error})",
            where=str(path),
            expected="a YAML file",
        ) from error
    except yaml.YAMLError as error:
        raise UsageError(
            f"The file is not YAML ({' '.join(str(error).split())[:300]})", where=str(path), expected="settings"
        ) from error
    folder = path.resolve().parent
    config = read(override(mapping or {}, changes, parse), str(path)).rooted(lambda name: str(folder / name))
    config.check()
    return config


def train(
    context: typer.Context,
    config: ConfigFile = Path("config.yaml"),
    local: Annotated[bool, typer.Option("--local", help="Run all roles on this machine.")] = False,
    changes: Changes = [],  # noqa: B006 - typer reads it
    folder: Annotated[Path | None, typer.Option(help="Folder of the run (default: log_path/NAME-TIME).")] = None,
    threads: Annotated[int, typer.Option(help="Threads of each party.")] = 1,
    deadline: o.Deadline = 60.0,
) -> None:
    """Fine-tune a model that is cut between owners of data and workers."""
    if not local:
        raise UsageError(
            "Only --local runs all roles",
            where="splitlm train",
            expected="--local",
            remedy="Elsewhere: splitlm coordinator on one machine, and splitlm client on each of the others",
        )
    voice = console(context)
    settings = read_config(config, changes)
    place = run_folder(settings, folder)
    voice.say("starting")
    with held():
        from splitlm.localtrain import LocalSettings, train_here

    threads = o.at_least(1, threads, "--threads")
    parties = LocalSettings(config.resolve(), changes, place, threads)
    train_here(lead_settings(voice, settings, place, deadline), parties)
    voice.note(f"the run is in {place}")


def coordinator(
    context: typer.Context,
    config: ConfigFile = Path("config.yaml"),
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Control port of the parties.")] = "127.0.0.1:0",
    changes: Changes = [],  # noqa: B006 - typer reads it
    folder: Annotated[Path | None, typer.Option(help="Folder of the run (default: log_path/NAME-TIME).")] = None,
    deadline: o.Deadline = 60.0,
    token_file: o.TokenFile = None,
) -> None:
    """Coordinate a training run: owners and workers come with splitlm client."""
    voice = console(context)
    settings = read_config(config, changes)
    address = o.address(listen, "--listen")
    place = run_folder(settings, folder)
    with held():
        from splitlm.localtrain import coordinate

    signal.signal(signal.SIGINT, signal.default_int_handler)
    token = o.read_token(token_file)
    lead = lead_settings(voice, settings, place, deadline, token=token, states=(address[0], 0))
    asyncio.run(
        coordinate(
            lead, address, lambda port: voice.note(f"parties join with: splitlm client --join {address[0]}:{port}")
        )
    )
    voice.note(f"the run is in {place}")


def client(
    context: typer.Context,
    config: ConfigFile = Path("config.yaml"),
    layer_id: Annotated[int, typer.Option("--layer-id", "--layer_id", help="1: an owner of data. 2: a worker.")] = 1,
    join: Annotated[str, typer.Option(metavar="HOST:PORT", help="The coordinator's address.")] = "",
    changes: Changes = [],  # noqa: B006 - typer reads it
    data: Annotated[Path | None, typer.Option(help="Rows that are all this owner's.")] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    compute_weight: Annotated[float, typer.Option(help="A worker's share of the work, against the others'.")] = 1.0,
    tensor_host: Annotated[str, typer.Option(help="Host at which owners reach this worker.")] = "",
    tensor_port: Annotated[int, typer.Option(help="Its port; 0 takes a free one.")] = 0,
    tensor_bind: Annotated[str, typer.Option(help="Address to listen on, where it differs.")] = "",
    threads: Annotated[int, typer.Option(help="Threads; 0 leaves torch's choice.")] = 0,
    deadline: o.Deadline = 60.0,
    token_file: o.TokenFile = None,
    parent: Annotated[int, typer.Option(hidden=True, help="The process that started this one.")] = 0,
) -> None:
    """Take part in a training run, as an owner of data or as a worker."""
    voice = console(context)
    if layer_id not in (1, 2):
        raise UsageError(f"--layer-id is {layer_id}", where="splitlm client", expected="1 (owner) or 2 (worker)")
    if not join:
        raise UsageError("There is no coordinator to join", where="--join", expected="HOST:PORT, as it prints it")
    settings = read_config(config, changes)
    at = o.address(join, "--join")
    with held():
        from splitlm.model.source import resolve
        from splitlm.node.party import PartySettings, join_run
        from splitlm.node.partylinks import LinkSettings

    signal.signal(signal.SIGINT, signal.default_int_handler)
    _ = device
    shape = settings.learning.u_shape
    links = LinkSettings(
        host=tensor_host,
        port=tensor_port,
        bind=tensor_bind,
        token=o.read_token(token_file),
        deadline_s=deadline,
        pool_bytes=shape.pool_bytes,
    )
    party = PartySettings(
        role="owner" if layer_id == 1 else "worker",
        config=settings,
        resolve=lambda name, weights: resolve(name, weights=weights, progress=voice.say),
        links=links,
        weight=compute_weight,
        threads=o.at_least(0, threads, "--threads"),
        own_data=data,
        say=voice.say,
    )
    asyncio.run(join_run(party, at, parent))
    if not parent:
        voice.note("the run is over")


def run_folder(config: RunConfig, folder: Path | None) -> Path:
    """The run's folder, made.

    Raises:
        UsageError: it cannot be made, or holds something.
    """
    place = folder or Path(config.log_path) / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    try:
        place.mkdir(parents=True, exist_ok=folder is not None)
    except OSError as error:
        raise UsageError(f"The folder cannot be made ({error.strerror})", where=str(place)) from error
    return place


def lead_settings(voice: Console, config: RunConfig, folder: Path, deadline: float, **more: Any) -> Any:
    """What the coordinator is told."""
    from splitlm.model.source import resolve
    from splitlm.node.trainlead import LeadSettings

    def record(kind: str, row: dict[str, Any]) -> None:
        if kind == "round":
            voice.note(
                f"round {row['round'] + 1}: " + ", ".join(f"{k} {v:.4g}" for k, v in row.items() if v is not None)
            )

    return LeadSettings(
        config,
        lambda name, weights: resolve(name, weights=weights, progress=voice.say),
        folder=folder,
        deadline_s=deadline,
        say=voice.say,
        record=record,
        **more,
    )
