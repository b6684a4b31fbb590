"""``splitlm train``, ``coordinator`` and ``client``: fine-tune where the data lives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from splitlm.cli import options as o
from splitlm.cli.console import Console, console
from splitlm.cli.interrupts import held
from splitlm.core.errors import UsageError
from splitlm.planner.routing import fair

if TYPE_CHECKING:
    from splitlm.core.config import RunConfig

RunConfigFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="CONFIG",
        help="The file of settings (YAML); with --resume, the run's.",
        show_default="config.yaml",
    ),
]
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The file of settings (YAML).")]
Changes = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a setting: a.b=c.")]
Resume = Annotated[
    Path | None, typer.Option(metavar="RUN", help="Go on with the run in this folder, from its last complete round.")
]
AsJson = Annotated[bool, typer.Option("--json", help="The closing summary as one JSON object.")]
UNDERSCORES = {"token_normalize_func": lambda word: word.replace("_", "-")}
"""Options are taken with underscores too (``--layer_id``), as older scripts write them."""
_log = logging.getLogger("splitlm.train")


def read_config(voice: Console, path: Path, changes: list[str], *, resumed: bool = False) -> RunConfig:
    """The settings of a run, checked; what a user should hear of them is said.

    Raises:
        UsageError: the file is not there, is not YAML, or a setting is wrong.
    """
    from splitlm.core.config_cautions import cautions
    from splitlm.finetune.runfile import read_run

    config = read_run(path, changes)
    for caution in cautions(config, resumed=resumed):
        voice.warn(caution)
    return config


def config_of(config: Path | None, resume: Path | None) -> Path:
    """The file of settings: the one that is named, or else that of the run which is gone on with.

    Raises:
        UsageError: there is no run to go on with.
    """
    stored = resume / "config.yaml" if resume is not None else None
    if stored is not None and not stored.is_file():
        raise UsageError("There is no run here", where=f"--resume {resume}", expected="the folder of an earlier run")
    return config or stored or Path("config.yaml")


def warn_of_password(voice: Console, settings: RunConfig, config: Path | None, *, local: bool) -> None:
    """Say that a run's own file of settings, where no other is named, does not know the broker's password."""
    broker = settings.bus(local) == "rabbitmq" or settings.learning.u_shape.transport == "rabbitmq"
    if config is None and broker and "rabbit.password" not in settings.given:
        voice.warn(
            "a run's folder does not store the broker's password, so the default one is tried: name the CONFIG that "
            "has it, or add --set rabbit.password=PASSWORD"
        )


def list_unused(config: RunConfig, *, local: bool) -> None:
    """Write to the log, once, which settings this run does not read."""
    if unused := config.unused_here(local):
        _log.info("Settings that this run does not read: %s", ", ".join(unused))


def train(
    context: typer.Context,
    config: RunConfigFile = None,
    local: Annotated[bool, typer.Option("--local", help="Run all roles here; --resume implies it.")] = False,
    changes: Changes = [],  # noqa: B006 - typer reads it
    folder: Annotated[Path | None, typer.Option(help="Folder of the run (default: log_path/NAME-TIME).")] = None,
    resume: Resume = None,
    threads: Annotated[int, typer.Option(help="Threads of each party.")] = 1,
    deadline: o.Deadline = 60.0,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a model that is cut between owners of data and workers."""
    if not local and resume is None:
        raise UsageError(
            "Only --local runs all roles",
            where="splitlm train",
            expected="--local, or --resume RUN",
            remedy="Elsewhere: splitlm coordinator on one machine, and splitlm client on each of the others",
        )
    voice = console(context)
    file = config_of(config, resume)
    settings = read_config(voice, file, changes, resumed=resume is not None)
    threads = o.at_least(1, threads, "--threads")
    wait = o.seconds(deadline, "--deadline")
    if resume is not None:
        warn_of_password(voice, settings, config, local=True)
    lead_run(voice, settings, file, as_json, folder, resume=resume, changes=changes, threads=threads, deadline_s=wait)


def coordinator(
    context: typer.Context,
    config: RunConfigFile = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Control port of the parties; with a broker, the aggregator's.")
    ] = "127.0.0.1:0",
    advertise: Annotated[str, typer.Option(help="Host at which parties reach this machine, where it differs.")] = "",
    changes: Changes = [],  # noqa: B006 - typer reads it
    folder: Annotated[Path | None, typer.Option(help="Folder of the run (default: log_path/NAME-TIME).")] = None,
    resume: Resume = None,
    deadline: o.Deadline = 60.0,
    token_file: o.TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Coordinate a training run: owners and workers come with splitlm client."""
    voice = console(context)
    file = config_of(config, resume)
    settings = read_config(voice, file, changes, resumed=resume is not None)
    address = o.address(listen, "--listen")
    if resume is not None:
        warn_of_password(voice, settings, config, local=False)

    def opened(port: int) -> None:
        how = f" --join {advertise or address[0]}:{port}" if port else ", at the broker"
        voice.note(f"parties join with: splitlm client {file} --layer-id 1{how} (owners; workers with --layer-id 2)")

    lead_run(
        voice,
        settings,
        file,
        as_json,
        folder,
        local=False,
        resume=resume,
        changes=changes,
        deadline_s=o.seconds(deadline, "--deadline"),
        listen=address,
        advertise=advertise,
        token=o.read_token(token_file),
        opened=opened,
    )


def client(
    context: typer.Context,
    config: ConfigFile = Path("config.yaml"),
    layer_id: Annotated[int, typer.Option(help="1: an owner of data. 2: a worker.")] = 1,
    join: Annotated[str, typer.Option(metavar="HOST:PORT", help="The coordinator's address.")] = "",
    changes: Changes = [],  # noqa: B006 - typer reads it
    data: Annotated[Path | None, typer.Option(help="Rows that are all this owner's.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where this party stores each round, to go on from it.")] = None,
    device: Annotated[str, typer.Option(help="Where it computes: cpu, cuda or cuda:N.")] = "cpu",
    compute_weight: Annotated[float, typer.Option(help="A worker's share of the work, against the others'.")] = 1.0,
    tensor_host: Annotated[
        str,
        typer.Option(help="Host at which others reach this machine (default: its address towards the coordinator)."),
    ] = "",
    tensor_port: Annotated[int, typer.Option(help="A worker's port, and the next one; 0 takes free ones.")] = 0,
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
    wait = o.seconds(deadline, "--deadline")
    weight = worker_weight(compute_weight)
    settings = read_config(voice, config, changes)
    port = first_port(tensor_port, settings)
    at = coordinator_address(settings, join, local=bool(parent))
    with held():
        from splitlm.model.device import find_device
        from splitlm.model.source import resolve
        from splitlm.node.guard import Guard
        from splitlm.node.party import PartySettings, join_run
        from splitlm.node.partylinks import LinkSettings

    find_device(device)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    shape = settings.learning.u_shape
    links = LinkSettings(
        host=tensor_host,
        port=port,
        bind=tensor_bind,
        token=o.read_token(token_file),
        guard=Guard.of(settings),
        deadline_s=wait,
        pool_bytes=shape.pool_bytes,
    )
    party = PartySettings(
        role="owner" if layer_id == 1 else "worker",
        config=settings,
        resolve=lambda name, weights: resolve(name, weights=weights, progress=voice.say),
        links=links,
        weight=weight,
        threads=o.at_least(0, threads, "--threads"),
        own_data=data,
        folder=folder,
        device=device,
        say=voice.say,
    )
    with party_log(voice, settings, party.role, parent):
        list_unused(settings, local=bool(parent))
        asyncio.run(join_run(party, at, parent))
    if not parent:
        voice.note("the run is over")


def worker_weight(weight: float) -> float:
    """A worker's share of the work.

    Raises:
        UsageError: not a positive number.
    """
    if not fair(weight):
        raise UsageError(f"It is {weight}", where="--compute-weight", expected="a positive number")
    return weight


def first_port(port: int, config: RunConfig) -> int:
    """The first of a worker's ports: one for each of two lanes, and one for states where a worker averages.

    Raises:
        UsageError: one of them is none.
    """
    more = 2 if config.averages_at else 1
    last = 65535 - more
    if not 0 <= port <= last:
        raise UsageError(
            f"It is {port}",
            where="--tensor-port",
            expected=f"0, or a port from 1 to {last}: the next {f'{more} are' if more > 1 else 'one is'} used too",
        )
    return port


def coordinator_address(config: RunConfig, join: str, *, local: bool) -> tuple[str, int] | None:
    """Where a party finds the coordinator; None where both meet at the broker.

    Raises:
        UsageError: it is not said, or said where it is not used.
    """
    if config.bus(local) == "star":
        if not join:
            raise UsageError("There is no coordinator to join", where="--join", expected="HOST:PORT, as it prints it")
        return o.address(join, "--join")
    if join:
        raise UsageError(
            f"The settings meet at the broker {config.rabbit.address}, where no coordinator is joined by its address",
            where=f"--join {join}",
            remedy="Leave it out, or set server.bus: star",
        )
    return None


def lead_run(voice: Console, settings: RunConfig, file: Path, as_json: bool, folder: Path | None, **how: Any) -> None:
    """Lead a run to its end and sum it up; ``how`` is as ``splitlm.train`` takes it."""
    from splitlm.cli.train_view import TrainView, tell

    voice.say("starting")
    with held():
        from splitlm.finetune.runfile import run_folder
        from splitlm.training import train as run_it

    signal.signal(signal.SIGINT, signal.default_int_handler)  # for which asyncio puts a gentler one
    earlier = how.get("resume")
    new = folder is None or not os.path.lexists(folder)
    place = earlier or run_folder(settings, folder)
    before = own_logs(place)
    view = TrainView(voice, settings)
    try:
        with voice.logged(place / "coordinator.log", debug=settings.debug_mode):
            list_unused(settings, local=how.get("local", True))
            run = run_it(file, folder=place if earlier is None else None, say=view.say, record=view.record, **how)
    except BaseException:
        if earlier is None:
            remove_if_idle(place, own_logs(place) - before, new)
        raise
    finally:
        view.close()
    if as_json:
        output = str(run.output) if run.output is not None else None
        voice.json({"folder": str(run.folder), "output": output, **msgspec.to_builtins(run.summary)})
    else:
        tell(voice, run, settings)


@contextlib.contextmanager
def party_log(voice: Console, config: RunConfig, role: str, parent: int) -> Iterator[None]:
    """Where a party's log goes: a file below ``log_path``; stderr where whoever started it keeps that.

    Raises:
        UsageError: the file cannot be written.
    """
    if parent:
        voice.set(log_level="debug" if config.debug_mode else "info")
        yield
        return
    folder = Path(config.log_path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"log_path cannot be made ({error.strerror or error})", where=str(folder)) from error
    path = folder / f"{config.name}-{role}-{os.getpid()}.log"
    with voice.logged(path, debug=config.debug_mode):
        yield
    voice.note(f"the log is {path}")


def own_logs(folder: Path) -> set[Path]:
    """The logs that a run writes into its folder."""
    names = ("coordinator", "owner-[0-9]*", "worker-[0-9]*")
    return {path for name in names for path in folder.glob(f"{name}.log")}


def remove_if_idle(folder: Path, made: set[Path], new: bool) -> None:
    """Take away the logs that a run has made which never began, and its folder if that is new and empty then."""
    with contextlib.suppress(OSError):
        if not (folder / "config.yaml").exists():
            for path in made:
                path.unlink()
            if new:
                folder.rmdir()
