"""``splitlm export``: the model or the adapter of a training run, for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splitlm.cli.console import console
from splitlm.cli.interrupts import held
from splitlm.core.errors import UsageError

if TYPE_CHECKING:
    from splitlm.finetune.export import Kind


def export(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a training run.")],
    to: Annotated[Path, typer.Option(help="Where to: a new folder, or a checkpoint to replace.")],
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapter into the model it began with.")] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="The adapter, and no model.")] = False,
) -> None:
    """Write what a run made to a directory that transformers or peft loads."""
    if merge and adapter:
        raise UsageError("--merge and --adapter exclude each other", remedy="Leave one of the two out")
    voice = console(context)
    voice.say(f"exporting {run}")
    with held():
        from splitlm.finetune.export import export as write
        from splitlm.model.source import resolve

    kind: Kind = "merged" if merge else "adapter" if adapter else "as it is"
    what = write(run, to, kind, lambda name, weights: resolve(name, weights=weights, progress=voice.say))
    voice.done()
    voice.out(f"{to}: {what}")
