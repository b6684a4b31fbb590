"""``splitlm plan``: what a cut would hold, without loading a model."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from splitlm.cli import options as o
from splitlm.cli.console import Console, console
from splitlm.cli.interrupts import held
from splitlm.cli.plan_measure import MeasureOptions, by_times
from splitlm.cli.tables import table

if TYPE_CHECKING:
    from splitlm.node.plan import Plan

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def plan(
    context: typer.Context, model: o.Model, cut: o.CutOptions, times: MeasureOptions, as_json: o.AsJson = False
) -> None:
    """Show a cut of MODEL and what each stage would hold; or measure machines, and cut by their times.

    A directory with a config.json is enough where nothing is measured.
    """
    voice = console(context)
    if by_times(voice, model, cut, times, as_json=as_json):
        return
    settings = cut.settings()
    voice.say("opening the model")
    with held():
        from splitlm.node import plan as planning

    made = planning.plan(model, **settings, say=voice.say)
    if as_json:
        voice.json(as_data(made))
    else:
        show(voice, made)


def as_data(made: Plan) -> dict[str, Any]:
    """The plan as JSON values."""
    data = asdict(made)
    del data["cut"]
    cut = made.cut
    return data | {"folder": str(made.folder), "blocks": cut.blocks, "cuts": cuts(made), "private": cut.private}


def cuts(made: Plan) -> tuple[int, ...]:
    """The boundaries as ``--cuts`` takes them: the last segment of a private cut follows from --tail-blocks."""
    return made.cut.boundaries[:-1] if made.cut.private else made.cut.boundaries


def show(voice: Console, made: Plan) -> None:
    """Print the plan as a table."""
    cut = made.cut
    edges = ",".join(map(str, cuts(made)))
    kind = f"{'private, ' if cut.private else ''}cuts {edges}" if edges else "uncut"
    voice.out(f"{made.model}: {cut.blocks} blocks, {kind}; {made.dtype}, context {made.context:,} tokens")
    columns = ["stage", "holds", "parameters", "weights", "KV per token", "KV at most"]
    rows = [
        [
            str(stage.node),
            stage.segments,
            f"{stage.parameters:,}",
            size(stage.weight_bytes),
            size(stage.kv_bytes_per_token),
            size(stage.kv_cap_bytes),
        ]
        for stage in made.stages
    ]
    if len(rows) > 1:
        keys = ("parameters", "weight_bytes", "kv_bytes_per_token", "kv_cap_bytes")
        parameters, *bytes_ = (sum(getattr(stage, key) for stage in made.stages) for key in keys)
        rows.append(["all", "", f"{parameters:,}", *map(size, bytes_)])
    table(voice, columns, rows, left=2)
    if made.twice_bytes:
        voice.out(
            f"Embedding and head share one table of {size(made.twice_bytes)}: the first and the last stage hold a copy "
            "each, and all counts both."
        )
    cap = f"KV is per session; at most: at {made.context:,} tokens"
    if made.window is not None:
        cap += f", of which a block with a sliding window keeps {made.window - 1:,} (its window − 1)"
    voice.out(cap + ".")


def size(nbytes: int) -> str:
    """Bytes for people: exact below 10 KiB, else in the largest unit of which there are ten."""
    for unit, one in UNITS:
        if nbytes >= 10 * one:
            return f"{nbytes / one:,.1f} {unit}"
    return f"{nbytes:,} B"
