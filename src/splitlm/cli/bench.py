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
    repetitions: Repetitions = 5,
    only: Only = None,
    json: Json = None,
) -> None:
    """A ring against the uncut model, its hops, two cores, simulated devices, and what tracing and privacy cost."""
    from splitlm.bench.comparison import measure
    from splitlm.bench.ring import COMPARISONS

    voice = console(context)
    settings: dict[str, str | int] = {
        "model": model,
        "tokens": o.at_least(2, tokens, "--tokens"),
        "repetitions": o.at_least(1, repetitions, "--repetitions"),
    }
    names = [o.choice(name, tuple(COMPARISONS), "--only") for name in only or COMPARISONS]
    folder = run_dir("bench-ring", run.trace_dir, run.no_trace, run.run_label, {**settings, "only": names})
    figures = measure(COMPARISONS, model, names, tokens=tokens, repetitions=repetitions, folder=folder, say=voice.say)
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
