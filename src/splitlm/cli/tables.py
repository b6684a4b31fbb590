"""Tables of results: rules and colour on a terminal, plain aligned columns in a pipe."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

from splitlm.cli.console import Console

PIPE_WIDTH = 120


def table(voice: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> None:
    """Print one; the first ``left`` columns are words, the others numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console as Rich
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold", border_style="dim")
    for i, column in enumerate(columns):
        drawn.add_column(column, justify="left" if i < left else "right", overflow="fold", no_wrap=i >= left)
    for row in rows:
        drawn.add_row(*map(Text, row))
    shown, text = sys.stdout.isatty(), io.StringIO()
    terminal = Rich(
        file=text, force_terminal=shown, highlight=False, width=None if shown else PIPE_WIDTH, legacy_windows=False
    )
    terminal.print(drawn)
    voice.out("\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines()))
