"""``splitlm check quality``: what an engine changes, over a text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splitlm.cli import options as o
from splitlm.cli.console import Console, console
from splitlm.cli.interrupts import held
from splitlm.cli.runs import RunOptions, keep_result
from splitlm.cli.tables import table
from splitlm.core.engines import ENGINES
from splitlm.core.errors import CheckFailedError, UsageError

if TYPE_CHECKING:
    from splitlm.check.quality import Quality


def quality(
    context: typer.Context,
    model: o.Model,
    run: RunOptions,
    compute: Annotated[str, typer.Option(help="Engine to measure: fast, int8, int4, or several with commas.")] = "fast",
    text: Annotated[Path | None, typer.Option(help="File with a text in UTF-8 (default: a short one of ours).")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to foretell; each takes memory for one row of logits.")] = 256,
    prefill_chunk: o.PrefillChunk = 32,
    threads: Annotated[int, typer.Option(help="Threads to compute with; 0: all of this machine's cores.")] = 1,
    family: o.FamilyName = "",
    min_top1: Annotated[
        float | None, typer.Option(help="Fail below this share, 0 to 1, of tokens that exact finds most probable too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Measure what an engine changes: perplexity and logits of MODEL over a text, against exact in float32.

    It tells figures and judges none, unless --min-top1 says what is too little: then exit code 1.
    """
    voice = console(context)
    names = [o.choice(name.strip(), ENGINES[1:], "--compute") for name in compute.split(",")]
    if min_top1 is not None and not 0 <= min_top1 <= 1:
        raise UsageError(f"It is {min_top1:g}", where="--min-top1", expected="a share, from 0 to 1")
    settings: dict[str, Any] = {
        "text": text,
        "tokens": o.at_least(1, tokens, "--tokens"),
        "threads": o.ring_threads(threads, 1),
        "prefill_chunk": o.at_least(1, prefill_chunk, "--prefill-chunk"),
        "family": family,
    }
    voice.say("starting")
    with held():
        from splitlm.check.quality import quality as measured

    with run.folder("check-quality", {"model": model, "compute": names, **settings}) as folder:
        result = measured(model, names, say=voice.say, **settings)
        keep_result(folder, _json(result))
    if as_json:
        voice.json(_json(result))
    else:
        _show(voice, result)
    if folder is not None:
        voice.note(f"result in {folder}")
    poor = [column for column in result.engines if min_top1 is not None and column.top1 < min_top1]
    if poor:
        raise CheckFailedError(
            "; ".join(f"{column.name} agrees with exact on {column.top1:.2%} of the tokens" for column in poor),
            where="top-1",
            expected=f"at least {min_top1:.2%}",
        )


def _show(voice: Console, result: Quality) -> None:
    rows = [
        [c.name, f"{c.perplexity:.4f}", f"{c.top1:.2%}", f"{c.largest:.2g}", f"{c.median:.2g}"] for c in result.columns
    ]
    table(voice, ["engine", "perplexity", "same top-1", "largest |Δlogit|", "median |Δlogit|"], rows)
    voice.out(
        f"{result.scored} tokens were foretold, in {_count(result.passages, 'passage')}: {result.given} more are given "
        f"before, in steps of {result.chunk} rows,\n"
        "and then it goes row by row. A token's |Δlogit| is the largest over the vocabulary."
    )
    if result.rounding is not None:
        voice.out(f"float16: {result.rounding.share:.2%} of {result.rounding.numbers:,} weights are not exact in it.")
    for column in result.engines:
        if column.engine != column.name:
            voice.out(f"{column.name}: the engine is {column.engine}")
        for why in column.left[:1]:
            many = len(column.left)
            kept = "1 matrix stays" if many == 1 else f"{many} matrices stay"
            voice.out(f"{column.name}: {kept} in float32; of the first, {why}")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


def _json(result: Quality) -> dict[str, Any]:
    return {
        "columns": [asdict(column) for column in result.columns],
        "scored": result.scored,
        "passages": result.passages,
        "given": result.given,
        "prefill_chunk": result.chunk,
        **({} if result.rounding is None else {"inexact": result.rounding.share}),
    }
