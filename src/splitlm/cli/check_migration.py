"""``splitlm check migration``: every move of a cut, in one process without sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from splitlm.cli import options as o
from splitlm.cli.console import Console, console
from splitlm.cli.runs import RunOptions, keep_result
from splitlm.cli.tables import table
from splitlm.core.engines import ENGINES
from splitlm.core.errors import CheckFailedError

if TYPE_CHECKING:
    from splitlm.check.migration import Matrix, Moved


def migration(
    context: typer.Context,
    model: o.Model,
    cut: o.CutOptions,
    run: RunOptions,
    tokens: Annotated[int, typer.Option(help="Tokens of each case.")] = 40,
    shift_at: Annotated[list[int] | None, typer.Option(help="Blocks move after this token (default: 20).")] = None,
    prompt: Annotated[str, typer.Option(help="Text to go on from (default: one longer than a sliding window).")] = "",
    threads: Annotated[int, typer.Option(help="Threads of each operation.")] = 1,
    prefill_chunk: o.PrefillChunk = 128,
    compute: Annotated[str, typer.Option(help="Compute engine: exact, fast, int8 or int4.")] = "exact",
    as_json: o.AsJson = False,
) -> None:
    """Move blocks of MODEL in the middle of a text: at every boundary, by -2, -1, 1 and 2. No bit may change."""
    voice = console(context)
    settings = cut.settings(3)
    settings |= {
        "tokens": o.at_least(2, tokens, "--tokens"),
        "shift_at": [o.at_least(1, at, "--shift-at") for at in shift_at or [20]],
        "prompt": prompt,
        "threads": o.at_least(1, threads, "--threads"),
        "prefill_chunk": o.at_least(1, prefill_chunk, "--prefill-chunk"),
        "compute": o.choice(compute, ENGINES, "--compute"),
    }
    voice.say("starting")
    from splitlm.check.migration import migration as checked

    with run.folder("check-migration", {"model": model, **settings}) as folder:
        result = checked(model, say=voice.say, **settings)
        keep_result(folder, _json(result))
    if as_json:
        voice.json(_json(result))
    else:
        _show(voice, result)
    if folder is not None:
        voice.note(f"result in {folder}")
    if not result.ok:
        raise failure(result)


def failure(result: Matrix) -> CheckFailedError:
    """What changed, or did not happen, as one error."""
    bad = [case for case in result.cases if case.failure]
    return CheckFailedError(
        "; ".join(f"{_name(case)}: {case.failure}" for case in bad),
        where=f"{len(bad)} of {len(result.cases)} moves",
        expected="the tokens and logits of the ring that moves nothing, bit for bit",
    )


def _name(case: Moved) -> str:
    return f"boundary {case.shift.boundary} by {case.shift.k:+d} at token {case.shift.at}"


def _show(voice: Console, result: Matrix) -> None:
    voice.out("cut: " + " → ".join(result.held))
    columns = ["move", "blocks", "stages", "ids equal", "max |Δlogit|", "bit-equal", "KV bytes", "before", "pause ms"]
    rows = [
        [
            _name(case),
            ", ".join(map(str, case.blocks)) or "none",
            f"{case.source} → {case.target}",
            f"{case.comparison.matches}/{len(case.comparison.steps)}",
            f"{case.comparison.delta:.2g}",
            "yes" if case.comparison.bit_equal else "no",
            f"{case.kv_bytes:,}",
            f"{case.background_bytes:,}",
            f"{case.stood_ms:.1f}",
        ]
        for case in result.cases
    ]
    table(voice, columns, rows)
    voice.out(
        f"{len(result.cases)} moves in {result.dtype}, after a prompt of {result.prompt_tokens} tokens. KV bytes are\n"
        "as many as were due; before: sent while tokens flowed (a sliding window may drop some of it later)."
    )
    if result.ok:
        voice.out("A moved block changes nothing, bit for bit.")


def _json(result: Matrix) -> dict[str, Any]:
    return {
        "ok": result.ok,
        "cut": result.held,
        "dtype": result.dtype,
        "cases": [
            {
                "at": case.at,
                "boundary": case.shift.boundary,
                "k": case.shift.k,
                "blocks": case.blocks,
                "ids_equal": case.comparison.matches,
                "max_delta": case.comparison.delta,
                "bit_equal": case.comparison.bit_equal,
                "kv_bytes": case.kv_bytes,
                "kv_due": case.due,
                "background_bytes": case.background_bytes,
                "stood_ms": case.stood_ms,
                "failure": case.failure,
            }
            for case in result.cases
        ],
    }
