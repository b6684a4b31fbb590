"""``splitlm stage``: put this machine into a ring."""

from __future__ import annotations

import asyncio
import json
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from splitlm.cli import options as o
from splitlm.cli.certs import TlsFolder, tls_folder
from splitlm.cli.console import Console, console
from splitlm.cli.interrupts import held
from splitlm.cli.runs import RunOptions
from splitlm.core.errors import UsageError


@dataclass(frozen=True)
class PlaceOptions:
    """A place that the user fixes, instead of one that the head gives."""

    layer_begin: Annotated[int | None, typer.Option(help="Fixed place: first block; -1 for the first stage.")] = None
    layer_end: Annotated[int | None, typer.Option(help="Fixed place: one past the last block; -1 for the end.")] = None
    recv: Annotated[str, typer.Option(metavar="HOST:PORT", help="Fixed place: listen here for the stage before.")] = ""
    send: Annotated[str, typer.Option(metavar="HOST:PORT", help="Fixed place: the next stage's address.")] = ""
    ctrl: Annotated[str, typer.Option(metavar="HOST:PORT", help="Fixed place: the first stage's control address.")] = ""

    @property
    def given(self) -> bool:
        """Whether any of it was given."""
        return (self.layer_begin, self.layer_end) != (None, None) or bool(self.recv or self.send or self.ctrl)

    @property
    def first(self) -> bool:
        """Whether it is the first stage's: the head itself."""
        return self.layer_begin in (-1, 0)

    def check(self) -> None:
        """Make sure that it is whole.

        Raises:
            UsageError: a part is missing, or the bounds hold no block.
        """
        given = {"--layer-begin": self.layer_begin is not None, "--layer-end": self.layer_end is not None}
        given |= {"--recv": bool(self.recv), "--send": bool(self.send), "--ctrl": bool(self.ctrl)}
        lacking = [option for option, is_there in given.items() if not is_there]
        if lacking:
            raise UsageError(
                f"The fixed place lacks {', '.join(lacking)}",
                expected="--layer-begin, --layer-end, --recv, --send and --ctrl together",
                remedy="Or take the place that a head gives, with --join alone",
            )
        begin, end = self.layer_begin or 0, self.layer_end or 0
        if begin < -1 or end < -1 or 0 <= end <= max(begin, 0):
            raise UsageError(
                f"It holds blocks from {begin} to {end}",
                where="--layer-begin, --layer-end",
                expected="a first block, and one past the last block above it; or -1 for an end of the model",
            )


def stage(
    context: typer.Context,
    place: PlaceOptions,
    run: RunOptions,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The model on this machine, where its name differs from the head's.")
    ] = "",
    join: Annotated[str, typer.Option(metavar="HOST:PORT", help="The head's address (generate --listen).")] = "",
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the previous stage reaches this one (default: any port).")
    ] = "",
    advertise: Annotated[str, typer.Option(help="Host name that others use for this machine, if it differs.")] = "",
    role: Annotated[str, typer.Option(help="full: run the whole model here, uncut. Otherwise the bounds say it.")] = "",
    prompt: Annotated[str | None, typer.Option(help="First stage or --role full: what to generate from.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="First stage or --role full: tokens to generate.")] = 128,
    private: o.Private = False,
    family: o.FamilyName = "",
    loader: o.LoaderName = "shard",
    dtype: o.DTypeName = "auto",
    threads: Annotated[int, typer.Option(help="Threads; 0 takes the head's word, or else all cores.")] = 0,
    prefill_chunk: o.PrefillChunk = 128,
    deadline: o.Deadline = 60.0,
    ctrl_timeout: o.CtrlTimeout = 5.0,
    token_file: o.TokenFile = None,
    tls: TlsFolder = "",
    parent: Annotated[int, typer.Option(hidden=True, help="The head's process, where it started this one.")] = 0,
) -> None:
    """Be one stage of a ring: join a head, or take a fixed place. It runs until the head is done."""
    full = role == "full"
    if role and not full:
        raise UsageError(f"{role!r} is no role", where="--role", expected="full; any other follows from the bounds")
    ways = [way for way, asked in (("a fixed place", place.given), ("--role full", full), ("--join", join)) if asked]
    if len(ways) > 1:
        raise UsageError(f"{ways[0].capitalize()} and {ways[1]} exclude each other", remedy="Leave one of the two out")
    if not ways:
        raise UsageError(
            "There is no head to join", where="--join", expected="HOST:PORT, as generate --listen prints it"
        )
    if place.given:
        place.check()
    first = full or place.first
    of_first = {"--prompt": prompt is not None, "--max-new-tokens": max_new_tokens != 128, "--private": private}
    of_first |= {"--model-family": bool(family), "--loader": loader != "shard", "--dtype": dtype != "auto"}
    of_first |= {"--prefill-chunk": prefill_chunk != 128}
    of_joining = {"--listen": bool(listen), "--advertise": bool(advertise)}
    for option, asked in (of_joining if first else of_first).items():
        if asked:
            raise UsageError(
                "The first stage does not take it" if first else "Only the first stage takes it",
                where=option,
                remedy="Leave it out: --recv says where it listens" if first else "Give it to the head",
            )
    if place.given and listen:
        raise UsageError("A fixed place listens where --recv says", where="--listen", remedy="Leave it out")
    threads = o.at_least(0, threads, "--threads")
    shared = {"token": o.read_token(token_file), "deadline_s": o.seconds(deadline, "--deadline")}
    shared["ctrl_timeout_s"] = o.seconds(ctrl_timeout, "--ctrl-timeout")
    if first:
        ring = o.RingOptions(
            private=private,
            family=family,
            loader=loader,
            dtype=dtype,
            threads=threads,
            prefill_chunk=prefill_chunk,
            deadline=deadline,
            tls=tls,
        )
        ctrl = o.address(place.ctrl, "--ctrl") if place.given else None
        settings = {**ring.settings(listen=ctrl, engine="fast"), **shared}
        if place.given:
            settings |= {
                "data": o.address(place.recv, "--recv"),
                "send": o.address(place.send, "--send"),
                "static": place.layer_end,
            }
        _be_first(console(context), model, prompt, max_new_tokens, settings, run)
        return
    settings = {
        **shared,
        "listen": o.address(listen, "--listen") if listen else ("", 0),
        "advertise": advertise,
        "parent": parent,
        "threads": threads,
    }
    ends = [o.address(place.ctrl, "--ctrl")] if place.given else [o.address(join, "--join")]
    settings["tls"] = Path(folder) if (folder := tls_folder(tls, *ends, settings["listen"])) else None
    # Where a folder is shared with the head on this machine, the head's settings stay in it.
    with run.folder(
        "stage", None if parent or _is_anothers(run.trace_dir) else {"model": model, "join": join}
    ) as traces:
        _follow(console(context), model, join, place if place.given else None, settings, traces)


def _be_first(
    voice: Console, model: str, prompt: str | None, max_new_tokens: int, settings: dict[str, Any], run: RunOptions
) -> None:
    """The first stage of a ring of fixed places, or a whole model: the one that has the prompt."""
    from splitlm.cli.generate import write

    if not model:
        raise UsageError("There is no model", where="MODEL", expected="the model that the first stage is to run")
    if prompt is None:
        raise UsageError("The first stage has no prompt", where="--prompt", expected="the text to go on from")
    count = o.at_least(1, max_new_tokens, "--max-new-tokens")
    written = {key: value for key, value in settings.items() if key != "token"}
    with run.folder("stage", {"model": model, **written, "max_new_tokens": count}) as folder:
        settings["trace_dir"] = folder
        write(voice, model, o.texts([prompt]), settings, {"max_new_tokens": count})


def _follow(
    voice: Console, model: str, join: str, place: PlaceOptions | None, settings: dict[str, Any], trace_dir: Path | None
) -> None:
    """Any other stage."""
    head = o.address(place.ctrl, "--ctrl") if place else o.address(join, "--join")
    ends = (o.address(place.recv, "--recv"), o.address(place.send, "--send")) if place else None
    voice.say("starting")
    with held():
        from splitlm.model.source import resolve
        from splitlm.node.join import run_stage
        from splitlm.node.settings import Place, StageSettings

    signal.signal(signal.SIGINT, signal.default_int_handler)  # for which asyncio puts a gentler one
    find = partial(resolve, progress=voice.say)
    fixed = Place(place.layer_begin or 0, place.layer_end or 0, *ends) if place and ends else None
    asyncio.run(
        run_stage(
            StageSettings(
                head=head,
                resolve=find,
                model=model,
                place=fixed,
                trace_dir=trace_dir,
                say=voice.say,
                **settings,
            )
        )
    )
    if not settings["parent"]:
        voice.note("the head is done" + (f"; trace in {trace_dir}" if trace_dir else ""))


def _is_anothers(folder: Path | None) -> bool:
    """Whether the settings in a folder are those of another verb's run."""
    try:
        told = json.loads((folder / "run.json").read_text()) if folder is not None else None
    except (OSError, ValueError):
        return False
    return isinstance(told, dict) and told.get("verb") != "stage"
