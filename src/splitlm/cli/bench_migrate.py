"""``splitlm bench migrate``: what windows, moves and a plan that decides by itself cost and bring."""

from __future__ import annotations

from typing import Annotated

import typer

from splitlm.cli import options as o
from splitlm.cli.bench_output import Json, Only, Repetitions, finish
from splitlm.cli.console import console
from splitlm.cli.runs import RunOptions, run_dir

TOKENS = 64


def migrate(
    context: typer.Context,
    run: RunOptions,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=o.MODEL_HELP)] = "smollm2-135m",
    repetitions: Repetitions = 5,
    only: Only = None,
    json: Json = None,
) -> None:
    """Barriers, moves of blocks while tokens flow, and a plan that decides by itself."""
    from splitlm.bench.comparison import measure
    from splitlm.bench.migrate import COMPARISONS

    voice = console(context)
    settings: dict[str, str | int] = {"model": model, "repetitions": o.at_least(1, repetitions, "--repetitions")}
    names = [o.choice(name, tuple(COMPARISONS), "--only") for name in only or COMPARISONS]
    folder = run_dir("bench-migrate", run.trace_dir, run.no_trace, run.run_label, {**settings, "only": names})
    figures = measure(COMPARISONS, model, names, tokens=TOKENS, repetitions=repetitions, folder=folder, say=voice.say)
    finish(voice, "migrate", settings, figures, json, folder)
