"""``splitlm bench train``: what cutting a training costs and brings, and what its links and its memory do."""

from __future__ import annotations

from typing import Annotated

import typer

from splitlm.cli import options as o
from splitlm.cli.bench_output import Json, Only, Repetitions, finish
from splitlm.cli.console import console
from splitlm.cli.runs import RunOptions, run_dir


def train(
    context: typer.Context,
    run: RunOptions,
    hidden: Annotated[int, typer.Option(help="Width of the model, a multiple of 4.")] = 256,
    blocks: Annotated[int, typer.Option(help="Blocks of the model.")] = 12,
    batch: Annotated[int, typer.Option(help="Rows per microbatch.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens per row.")] = 64,
    microbatches: Annotated[int, typer.Option(help="Microbatches per window.")] = 16,
    windows: Annotated[int, typer.Option(help="Windows per turn.")] = 1,
    rounds: Annotated[int, typer.Option(help="Rounds of the run whose memory is watched.")] = 200,
    repetitions: Repetitions = 5,
    only: Only = None,
    json: Json = None,
) -> None:
    """Split training against the uncut loop, unequal workers, pipelining, bytes, lanes, and memory over rounds."""
    settings: dict[str, str | int] = {
        "hidden": o.at_least(4, hidden, "--hidden") // 4 * 4,
        "blocks": o.at_least(3, blocks, "--blocks"),
        "batch": o.at_least(2, batch, "--batch"),
        "length": o.at_least(1, length, "--length"),
        "microbatches": o.at_least(1, microbatches, "--microbatches"),
        "windows": o.at_least(1, windows, "--windows"),
        "rounds": o.at_least(3, rounds, "--rounds"),
        "repetitions": o.at_least(1, repetitions, "--repetitions"),
    }
    from splitlm.bench.train import COMPARISONS, measure
    from splitlm.bench.trainset import Size

    voice = console(context)
    names = [o.choice(name, tuple(COMPARISONS), "--only") for name in only or COMPARISONS]
    folder = run_dir("bench-train", run.trace_dir, run.no_trace, run.run_label, {**settings, "only": names})
    size = Size(*(int(settings[key]) for key in ("hidden", "blocks", "batch", "length", "microbatches", "windows")))
    figures = measure(names, size=size, repetitions=repetitions, rounds=rounds, say=voice.say)
    finish(voice, "train", settings, figures, json, folder)
