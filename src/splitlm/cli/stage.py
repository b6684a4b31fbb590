"""``splitlm stage``: put this machine into a ring."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from splitlm.cli import options as o
from splitlm.cli.console import Console, console
from splitlm.core.errors import UsageError

Address = Annotated[str, typer.Option(metavar="HOST:PORT")]


def stage(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="The model on this machine, where its name differs from the head's.")
    ] = "",
    join: Annotated[str, typer.Option(metavar="HOST:PORT", help="The head's address (generate --listen).")] = "",
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the previous stage reaches this one [default: any port].")
    ] = "",
    advertise: Annotated[str, typer.Option(help="Host name that others use for this machine, if it differs.")] = "",
    role: Annotated[str, typer.Option(help="full: run the whole model here, uncut. Otherwise the bounds say it.")] = "",
    layer_begin: Annotated[int | None, typer.Option(help="Fixed place: first block; -1 for the first stage.")] = None,
    layer_end: Annotated[int | None, typer.Option(help="Fixed place: one past the last block; -1 for the end.")] = None,
    recv: Annotated[str, typer.Option(metavar="HOST:PORT", help="Fixed place: listen here for the stage before.")] = "",
    send: Annotated[str, typer.Option(metavar="HOST:PORT", help="Fixed place: the next stage's address.")] = "",
    ctrl: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Fixed place: the first stage's control address.")
    ] = "",
    prompt: Annotated[str | None, typer.Option(help="First stage or --role full: what to generate from.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="First stage or --role full: tokens to generate.")] = 128,
    private: o.Private = False,
    family: o.FamilyName = "",
    loader: o.LoaderName = "shard",
    dtype: o.DTypeName = "auto",
    threads: Annotated[int, typer.Option(help="Threads; 0 takes the head's word.")] = 0,
    prefill_chunk: o.PrefillChunk = 128,
    deadline: o.Deadline = 60.0,
    token_file: o.TokenFile = None,
    trace_dir: o.TraceDir = None,
    no_trace: o.NoTrace = False,
    run_label: o.RunLabel = "",
) -> None:
    """Be one stage of a ring: join a head, or take a fixed place. It runs until the head is done."""
    voice = console(context)
    fixed = layer_begin is not None or layer_end is not None
    if role not in ("", "full"):
        raise UsageError(
            f"The role {role!r} is unknown", where="--role", expected="full, or the bounds --layer-begin, --layer-end"
        )
    first = role == "full" or (fixed and layer_begin in (-1, 0))
    if first:
        from splitlm.cli.generate import run_first

        if not model:
            raise UsageError("There is no model", where="MODEL", expected="the model that the first stage is to run")
        if fixed and not (recv and send and ctrl):
            raise UsageError("The first stage lacks an address", expected="--recv, --send and --ctrl, each HOST:PORT")
        run_first(
            voice,
            model,
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            layer_end=None if role == "full" else layer_end,
            addresses=None
            if role == "full"
            else tuple(o.address(a, n) for a, n in ((ctrl, "--ctrl"), (recv, "--recv"), (send, "--send"))),
            private=private,
            family=family,
            loader=o.choice(loader, ("shard", "hf"), "--loader"),
            dtype=dtype,
            threads=threads,
            prefill_chunk=prefill_chunk,
            deadline=deadline,
            token=o.read_token(token_file),
            trace_dir=_folder(trace_dir, no_trace, run_label),
        )
        return
    if prompt is not None:
        raise UsageError("Only the first stage takes a prompt", where="--prompt", remedy="Give it to the head")
    if fixed and (join or layer_begin is None or layer_end is None or not (recv and send and ctrl)):
        raise UsageError(
            "A fixed place is not complete",
            expected="--layer-begin, --layer-end, --recv, --send and --ctrl together, without --join",
        )
    if not fixed and not join:
        raise UsageError(
            "There is no head to join", where="--join", expected="HOST:PORT, as generate --listen prints it"
        )
    _serve(
        voice,
        model,
        join,
        listen,
        advertise,
        (layer_begin, layer_end),
        recv,
        send,
        ctrl,
        threads,
        deadline,
        token_file,
        _folder(trace_dir, no_trace, run_label),
    )


def _folder(trace_dir: Path | None, no_trace: bool, label: str) -> Path | None:
    from splitlm.cli.runs import run_dir

    return run_dir("stage", trace_dir, no_trace, label)


def _serve(
    voice: Console,
    model: str,
    join: str,
    listen: str,
    advertise: str,
    bounds: tuple[int | None, int | None],
    recv: str,
    send: str,
    ctrl: str,
    threads: int,
    deadline: float,
    token_file: Path | None,
    trace_dir: Path | None,
) -> None:
    from splitlm.model.source import resolve
    from splitlm.node.join import Place, StageSettings, run_stage

    place = None
    if bounds[0] is not None and bounds[1] is not None:
        place = Place(bounds[0], bounds[1], o.address(recv, "--recv"), o.address(send, "--send"))
    settings = StageSettings(
        head=o.address(ctrl, "--ctrl") if place else o.address(join, "--join"),
        resolve=resolve,
        model=model,
        token=o.read_token(token_file),
        deadline_s=deadline,
        listen=o.address(listen, "--listen") if listen else ("", 0),
        advertise=advertise,
        threads=threads,
        place=place,
        trace_dir=trace_dir,
        say=voice.say,
    )
    asyncio.run(run_stage(settings))
