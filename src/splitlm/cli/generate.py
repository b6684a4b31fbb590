"""``splitlm generate``: text from a ring."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splitlm.cli import options as o
from splitlm.cli.console import Console, console
from splitlm.cli.interrupts import held
from splitlm.cli.moves import told, unmet
from splitlm.cli.plan_measure import TimesOptions, plan_from, say_assumed
from splitlm.cli.runs import RunOptions
from splitlm.core.errors import UsageError

if TYPE_CHECKING:
    from splitlm.local import Generation


def generate(
    context: typer.Context,
    model: o.Model,
    ring: o.RingOptions,
    times: TimesOptions,
    sampling: o.SamplingOptions,
    run: RunOptions,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to go on from; several run at once. - reads stdin.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt through the model's chat template.")] = False,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Wait here for machines that join, instead of starting stages.")
    ] = "",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="End after so many tokens.")] = 128,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-sequence token.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt.")] = False,
) -> None:
    """Generate text with MODEL cut into stages: processes on this machine, or machines that join with splitlm stage."""
    where = o.address(listen, "--listen") if listen else None
    if where and ring.stages is None and not ring.cuts and times.plan_from is None:
        raise UsageError(
            "It is not said how many stages are to join",
            where="--listen",
            expected="--stages, --cuts or --plan-from with it",
        )
    voice = console(context)
    request = {
        "max_new_tokens": o.at_least(1, max_new_tokens, "--max-new-tokens"),
        "sampling": sampling.settings(),
        "stop": stop or [],
        "ignore_eos": ignore_eos,
    }
    ring = by_times(voice, model, ring, times, max(1, len(prompt or ())))
    settings = ring.settings(listen=where, engine="fast")
    settings["token"] = ring.token
    texts = o.texts(prompt)
    written = {key: value for key, value in settings.items() if key != "token"}
    with run.folder("generate", {"model": model, **written, **request, "chat": chat}) as folder:
        settings["trace_dir"] = folder
        write(voice, model, texts, settings, request, as_json=as_json, chat=chat)
    if folder is not None:
        voice.note(f"trace in {folder}")


def by_times(voice: Console, model: str, ring: o.RingOptions, times: TimesOptions, sessions: int) -> o.RingOptions:
    """The ring with the cut that its machines' times ask for, where they are given.

    Raises:
        UsageError, CutError: see ``cli.plan_measure.plan_from``.
    """
    if times.plan_from is None:
        return ring
    made = plan_from(times.plan_from, model, ring, times, voice, sessions=sessions)
    say_assumed(voice, made)
    edges = ",".join(map(str, made.cuts))
    voice.say(f"cuts {edges or 'none'}, by the times in {times.plan_from}")
    return replace(ring, cuts=edges, stages=len(made.ring.devices))


def write(
    voice: Console,
    model: str,
    texts: list[str],
    settings: dict[str, Any],
    request: dict[str, Any],
    *,
    as_json: bool = False,
    chat: bool = False,
) -> None:
    """Open a ring, generate from every text at once, close it. One text is streamed.

    Args:
        settings: arguments of ``Ring``.
        request: arguments of ``Ring.generate``.
    """
    from concurrent.futures import ThreadPoolExecutor

    voice.say("starting")
    with held():
        from splitlm.local import Ring

    live = len(texts) == 1 and not as_json
    ring = Ring(model, say=voice.say, **settings)
    codec = ring.codec  # a prompt that cannot be is found before others are made to load
    prompts = [codec.encode_chat([{"role": "user", "content": t}]) if chat else codec.encode(t) for t in texts]
    # The ring ends first, and with it what the pool waits for: Ctrl-C must not wait for whole texts.
    with ThreadPoolExecutor(len(prompts)) as pool, ring:
        if live:
            done = [ring.generate(prompts[0], on_text=lambda piece: voice.out(piece, end=""), **request)]
            voice.out("")
        else:
            voice.say("writing" if len(texts) == 1 else f"writing {len(texts)} texts")
            done = list(pool.map(lambda ids: ring.generate(ids, **request), prompts))
    shifts = settings.get("shifts", ())
    moves, missing = told(ring.boundaries, ring.migrations), unmet(ring.boundaries, shifts)
    for text, result in zip(texts, done, strict=True):
        if as_json:
            lines = [*moves, missing] if missing else moves
            voice.json({**_object(text, result), "moves": lines} if lines else _object(text, result))
        elif not live:
            voice.out(f"── {text}\n{result.text}\n")
    if not as_json:
        for line in _closing(done, live, request) + moves:
            voice.note(line)
        if settings.get("plan") == "auto" and not moves:
            voice.note("plan auto: no block moved")
    if missing:
        voice.warn(missing)


def _closing(done: list[Generation], live: bool, request: dict[str, Any]) -> list[str]:
    """What is said once the texts are there: how one ended, and how what was drawn can be drawn again."""
    asked = request.get("sampling")
    given = asked is not None and asked.seed is not None
    drawn = [] if given else [str(result.seed) for result in done if result.seed is not None]
    if live:
        return [f"{len(done[0].tokens)} tokens, ended by {done[0].finish}" + (f"; --seed {drawn[0]}" if drawn else "")]
    return [f"seeds {', '.join(drawn)}: each repeats its text"] if drawn else []


def _object(text: str, result: Generation) -> dict[str, Any]:
    return {
        "prompt": text,
        "text": result.text,
        "tokens": result.tokens,
        "finish": result.finish,
        "prompt_tokens": result.prompt_tokens,
        "seed": result.seed,
    }
