"""What the benches of the command line share: options, and where their result goes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splitlm.cli.console import Console

if TYPE_CHECKING:
    from splitlm.bench.figure import Figure

Repetitions = Annotated[int, typer.Option(help="Turns of each side that count.")]
Only = Annotated[
    list[str] | None, typer.Option("--only", help="Only this comparison; may be given several times (default: all).")
]
Json = Annotated[Path | None, typer.Option("--json", help="Where the result goes (default: the run's folder).")]


def finish(
    voice: Console,
    name: str,
    settings: Mapping[str, str | int],
    figures: list[Figure],
    path: Path | None,
    folder: Path | None,
) -> None:
    """Show the figures, and save them where the user or the run wants them.

    Raises:
        UsageError: the file cannot be written.
    """
    from splitlm.bench.figure import table
    from splitlm.bench.publish import save

    voice.out(table(figures))
    path = path or (folder / "result.json" if folder is not None else None)
    if path is not None:
        save(path, name, {**settings}, figures)
        voice.say(f"result in {path}")
