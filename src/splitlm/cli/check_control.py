"""``splitlm check control``: the barrier alone, without a model."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from splitlm.cli.console import console
from splitlm.cli.runs import RunOptions, keep_result
from splitlm.core.errors import CheckFailedError

if TYPE_CHECKING:
    from splitlm.check.control import Answer


def control(
    context: typer.Context,
    run: RunOptions,
    only: Annotated[str, typer.Option(help="One question: happy, nack or kill (default: all).")] = "",
    ctrl_timeout: Annotated[float, typer.Option(help="Seconds within which a death must be known to all.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Run the barrier between processes without a model: it commits, it is refused, and stages die in every state."""
    voice = console(context)
    from splitlm.check.control import check

    with run.folder("check-control", {"only": only, "ctrl_timeout": ctrl_timeout}) as folder:
        answer = check(only, ctrl_timeout, voice.say)
        found = {"ok": answer.ok, **asdict(answer)}
        keep_result(folder, found)
    if as_json:
        voice.json(found)
    else:
        for finding in answer.findings:
            voice.out(f"{'ok    ' if finding.ok else 'FAILED'} {finding.name}: {finding.text}")
        for name, value in answer.figures.items():
            voice.out(f"{name:<16} {value:.3f}")
    if folder is not None:
        voice.note(f"result in {folder}")
    if not answer.ok:
        raise failure(answer)


def failure(answer: Answer) -> CheckFailedError:
    """What did not go as it must, as one error."""
    bad = [finding for finding in answer.findings if not finding.ok]
    return CheckFailedError(
        "; ".join(f"{finding.name}: {finding.text}".rstrip(". ") for finding in bad),
        where=f"{len(bad)} of {len(answer.findings)} questions about the barrier",
    )
