"""``splitlm demo``: a story out of three processes, a block that moves in the middle of it, and the proof that neither
changed anything."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splitlm.cli import options as o
from splitlm.cli.console import Console, console
from splitlm.cli.interrupts import held
from splitlm.cli.moves import told as told_of
from splitlm.cli.runs import RunOptions
from splitlm.cli.tables import table
from splitlm.core.errors import CheckFailedError, CutError
from splitlm.core.shifts import Shift, check_shifts

if TYPE_CHECKING:
    from splitlm.check.compare import Comparison
    from splitlm.local import Generation
    from splitlm.node.settings import StageReport

MODEL = "smollm2-135m"
PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle."
WINDOW = 20
MIB = 2**20


@dataclass(frozen=True)
class _Told:
    """What came of it. ``pids`` are those of the stages that were started; timings need a trace."""

    prompt: str
    story: Generation
    reports: list[StageReport]
    pids: list[int]
    verdict: Comparison
    rate: float | None
    first_ms: float | None
    hop_ms: float | None
    moves: list[str]


def demo(
    context: typer.Context,
    run: RunOptions,
    model: Annotated[str, typer.Option(help=o.MODEL_HELP)] = MODEL,
    stages: Annotated[int, typer.Option(help="Processes to cut it over, this one included.")] = 3,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="End after so many tokens.")] = 120,
    prompt: Annotated[str, typer.Option(help="What to write.")] = PROMPT,
    as_json: o.AsJson = False,
) -> None:
    """Cut a model over processes of this machine, write a story while a block moves, and prove that nothing changed."""
    voice = console(context)
    o.at_least(1, stages, "--stages")
    count = o.at_least(1, max_new_tokens, "--max-new-tokens")
    settings: dict[str, Any] = {"stages": stages, "threads": o.ring_threads(0, stages), "dtype": "float32"}
    settings["window"] = WINDOW
    voice.say("starting")
    with run.folder("demo", {"model": model, "prompt": prompt, "max_new_tokens": count, **settings}) as folder:
        told = _tell(voice, model, prompt, count, {**settings, "trace_dir": folder}, live=not as_json)
    if as_json:
        voice.json(_json(told, model, folder))
    else:
        _show(voice, told, folder, model, stages)
    if not told.verdict.ok:
        raise CheckFailedError(
            told.verdict.failure, where="the ring differs from the uncut model", remedy="Report it with the trace"
        )


def _moves(model: str, stages: int, count: int) -> tuple[Shift, ...]:
    """One block, in the middle of the story, at the last boundary that can move; none where it is too short."""
    from splitlm.node.plan import plan

    cut = plan(model, stages=stages).cut
    for boundary in range(stages - 1, 0, -1):
        for asked in (Shift(count // 2, boundary, 1), Shift(count // 2, boundary, -1)):
            with suppress(CutError):
                check_shifts(cut, [asked])
                return (asked,) if count > 2 * WINDOW else ()
    return ()


def _tell(voice: Console, model: str, prompt: str, count: int, settings: dict[str, Any], *, live: bool) -> _Told:
    with held():
        from splitlm.check.compare import Run
        from splitlm.check.equivalence import Case, against, intra_op_threads
        from splitlm.local import Ring
        from splitlm.model.uncut import Uncut

    chunk, shifts = 128, _moves(model, settings["stages"], count)
    with Ring(model, prefill_chunk=chunk, shifts=shifts, say=voice.say, **settings) as ring:
        codec, files = ring.codec, ring.files
        ids = codec.encode_chat([{"role": "user", "content": prompt}]) if codec.has_chat_template else None
        ids = codec.encode(prompt) if ids is None else ids
        pids = list(ring.stage_pids)
        if live:
            _announce(voice, [str(part) for part in _held(ring)], pids, prompt)
        else:
            voice.say("writing")
        story = ring.generate(
            ids, max_new_tokens=count, logits=True, on_text=(lambda text: voice.out(text, end="")) if live else None
        )
        if live:
            voice.out("\n")
    moves = told_of(ring.boundaries, ring.migrations, shifts)
    voice.say("writing it again with the uncut model, for the proof")
    with intra_op_threads(settings["threads"]):
        case, made = Case(prompt, tuple(ids)), Run(story.tokens, story.logits)
        verdict = against(Uncut(files), case, made, count, chunk, "float32", codec.eos_ids)
    return _Told(prompt, story, ring.reports, pids, verdict, *_times(settings["trace_dir"]), moves)


def _held(ring: Any) -> list[str]:
    return ["; ".join(map(str, ring.cut.held_by(node))) for node in range(ring.cut.stages)]


def _times(folder: Path | None) -> tuple[float | None, float | None, float | None]:
    """Tokens per second, time to the first token, and the median hop, from the trace."""
    if folder is None:
        return None, None, None
    from splitlm.telemetry.record import Step
    from splitlm.telemetry.sinks import read_trace
    from splitlm.telemetry.summary import hop_times, percentile, summarize

    records = [record for path in sorted(folder.glob("trace-node*.jsonl")) for record in read_trace(path)]
    summary = summarize(records)
    hops = [ms for times in hop_times(r for r in records if isinstance(r, Step)).values() for ms in times]
    first = summary.ttft_ms.p50 if summary.ttft_ms else None
    return summary.tokens_per_s, first, percentile(hops, 50) if hops else None


def _announce(voice: Console, held: list[str], pids: list[int], prompt: str) -> None:
    who = ["this process", *(f"process {pid}" for pid in pids)]
    width = max(map(len, who))
    voice.out("\n".join(f"{name:<{width}}  {segments}" for name, segments in zip(who, held, strict=True)))
    voice.out(f"\n» {prompt}\n")


def _show(voice: Console, told: _Told, folder: Path | None, model: str, stages: int) -> None:
    seen = told.verdict
    laps = max(1, len(told.story.tokens) - 1)
    voice.out(
        f"tokens identical: {seen.matches}/{len(told.story.tokens)}, max |Δlogit| {seen.delta:.2g}"
        + (" (bit for bit what the uncut model computes)" if seen.bit_equal else "")
    )
    for line in told.moves:
        voice.out(line)
    for step in seen.excused:
        voice.out(f"EXCUSED index {step.index}: the top-2 margin {step.margin:.2g} is below 2·|Δ| {2 * step.delta:.2g}")
    columns = ["stage", "weights MiB", "peak MiB", "compute", "wait", "send"]
    rows = [
        [
            f"{report.node}  {report.segments}",
            f"{report.resident_bytes / MIB:.0f}",
            f"{(report.peak_rss_bytes - report.import_rss_bytes) / MIB:.0f}",
            *(f"{ms / laps:.2f}" for ms in (report.compute_ms, report.wait_ms, report.send_ms)),
        ]
        for report in told.reports
    ]
    table(voice, columns, rows)
    voice.out(
        "Times are ms per token. Peak is resident memory beyond that of the imports; this process also keeps\n"
        "the logits, which come home with every token for the proof alone."
    )
    if told.rate is not None and told.first_ms is not None:
        hop = f", a hop between two stages {told.hop_ms:.2f} ms (median)" if told.hop_ms is not None else ""
        voice.out(f"\n{told.rate:.1f} tokens/s, the first after {told.first_ms / 1e3:.2f} s{hop}")
    if folder is not None:
        voice.out(f"trace in {folder}")
    voice.out(
        "\nNext:\n"
        f"  splitlm generate {model} --stages {stages} --private --prompt 'Once upon a time'\n"
        f"  splitlm check equivalence {model} --stages {stages} --sessions 4\n"
        f"  splitlm generate {model} --stages 2 --listen 0.0.0.0:7000 --prompt 'A fox'    and on another machine:\n"
        "  splitlm stage --join HOST:7000"
    )


def _json(told: _Told, model: str, folder: Path | None) -> dict[str, Any]:
    seen = told.verdict
    return {
        "model": model,
        "prompt": told.prompt,
        "text": told.story.text,
        "tokens": told.story.tokens,
        "finish": told.story.finish,
        "ok": seen.ok,
        "identical": seen.matches,
        "max_delta": seen.delta,
        "bit_equal": seen.bit_equal,
        "moves": told.moves,
        "stages": [vars(report) for report in told.reports],
        "tokens_per_s": told.rate,
        "ttft_ms": told.first_ms,
        "hop_p50_ms": told.hop_ms,
        "trace": str(folder) if folder is not None else None,
    }
