"""``splitlm bench``: figures of this build on this machine, as ratios measured in one run."""

from __future__ import annotations

from typing import Annotated

import typer

from splitlm.cli import options as o
from splitlm.cli.bench_migrate import migrate
from splitlm.cli.bench_output import Json, Only, Repetitions, finish
from splitlm.cli.bench_train import train
from splitlm.cli.console import console
from splitlm.cli.runs import RunOptions, run_dir
from splitlm.core.engines import ENGINES

app = typer.Typer(no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure this build on this machine: ratios of one run, each beside its goal."""


@app.command()
def ring(
    context: typer.Context,
    run: RunOptions,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=o.MODEL_HELP)] = "smollm2-135m",
    tokens: Annotated[int, typer.Option(help="New tokens per session and turn.")] = 64,
    compute: Annotated[
        str, typer.Option(help="Engine to measure: exact, or one of fast, int8 and int4, each with figures of its own.")
    ] = "exact",
    repetitions: Repetitions = 5,
    only: Only = None,
    json: Json = None,
) -> None:
    """A ring against the uncut model, its hops, two cores, simulated devices, and what tracing and privacy cost.

    With --compute: what that engine brings against transformers, uncut, cut and in batches, and what it takes to start.
    """
    o.choice(compute, ENGINES, "--compute")
    from splitlm.bench import compute as engines
    from splitlm.bench import ring as exact
    from splitlm.bench.comparison import measure

    voice = console(context)
    settings: dict[str, str | int] = {
        "model": model,
        "tokens": o.at_least(2, tokens, "--tokens"),
        "repetitions": o.at_least(1, repetitions, "--repetitions"),
    }
    if compute != "exact":
        settings["compute"] = compute
    known = exact.COMPARISONS if compute == "exact" else engines.COMPARISONS
    names = [o.choice(name, tuple(known), "--only") for name in only or known]
    folder = run_dir("bench-ring", run.trace_dir, run.no_trace, run.run_label, {**settings, "only": names})
    figures = measure(
        known, model, names, tokens=tokens, repetitions=repetitions, compute=compute, folder=folder, say=voice.say
    )
    finish(voice, "ring", settings, figures, json, folder)


@app.command()
def wire(
    context: typer.Context,
    run: RunOptions,
    repetitions: Repetitions = 5,
    messages: Annotated[int, typer.Option(help="Messages per turn.")] = 300,
    json: Json = None,
) -> None:
    """Frames and links, in times of a bare echo of the same size."""
    from splitlm.bench.wire import wire as measure

    voice = console(context)
    settings = {
        "repetitions": o.at_least(1, repetitions, "--repetitions"),
        "messages": o.at_least(1, messages, "--messages"),
    }
    folder = run_dir("bench-wire", run.trace_dir, run.no_trace, run.run_label, settings)
    figures = measure(repetitions, messages, voice.say)
    finish(voice, "wire", settings, figures, json, folder)


app.command()(migrate)
app.command()(train)
