"""``splitlm generate``: text from a ring."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from splitlm.cli import options as o
from splitlm.cli.console import Console, console
from splitlm.cli.runs import run_dir
from splitlm.core.errors import UsageError
from splitlm.core.sampling import Sampling


def generate(
    context: typer.Context,
    model: o.Model,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to go on from; several run at once. - reads stdin.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt through the model's chat template.")] = False,
    stages: o.Stages = None,
    cuts: o.Cuts = "",
    private: o.Private = False,
    tail_blocks: o.TailBlocks = 0,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Wait here for machines that join, instead of starting stages.")
    ] = "",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="End after so many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy, the only reproducible mode.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most probable tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the smallest set of tokens with this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the best one's probability.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens already seen become less probable.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Of the random choice; drawn when absent.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-sequence token.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt.")] = False,
    family: o.FamilyName = "",
    loader: o.LoaderName = "shard",
    dtype: o.DTypeName = "auto",
    compute: o.Compute = "exact",
    threads: o.Threads = 0,
    prefill_chunk: o.PrefillChunk = 128,
    deadline: o.Deadline = 60.0,
    token_file: o.TokenFile = None,
    trace_dir: o.TraceDir = None,
    no_trace: o.NoTrace = False,
    run_label: o.RunLabel = "",
) -> None:
    """Generate text with MODEL cut into stages: processes on this machine, or machines that join with splitlm stage."""
    voice = console(context)
    boundaries = o.cut_list(cuts)
    count = len(boundaries) + 1 if boundaries is not None else (stages or 1)
    if boundaries is not None and stages not in (None, count):
        raise UsageError(f"--stages {stages} and --cuts {cuts} do not agree", expected=f"{count} stages for these cuts")
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, seed=seed
    )
    settings: dict[str, Any] = {
        "stages": count,
        "cuts": boundaries,
        "private": private,
        "tail_blocks": tail_blocks,
        "family": family,
        "loader": o.choice(loader, ("shard", "hf"), "--loader"),
        "dtype": dtype,
        "compute": o.choice(compute, ("exact",), "--compute"),
        "threads": o.ring_threads(threads, 1 if listen else count),
        "prefill_chunk": _positive(prefill_chunk, "--prefill-chunk"),
        "listen": o.address(listen, "--listen") if listen else None,
        "deadline_s": deadline,
    }
    texts = [sys.stdin.read() if text == "-" else text for text in prompt or [_no_prompt()]]
    folder = run_dir("generate", trace_dir, no_trace, run_label, {"model": model, **settings})
    options = {"max_new_tokens": max_new_tokens, "sampling": sampling, "stop": stop or [], "ignore_eos": ignore_eos}
    run_ring(
        voice,
        model,
        texts,
        {**settings, "token": o.read_token(token_file), "trace_dir": folder},
        options,
        as_json,
        chat,
    )
    if folder is not None:
        voice.say(f"trace in {folder}")


def run_ring(
    voice: Console,
    model: str,
    texts: list[str],
    settings: dict[str, Any],
    options: dict[str, Any],
    as_json: bool,
    chat: bool = False,
) -> None:
    """Open a ring, generate from every text at once, close it."""
    from concurrent.futures import ThreadPoolExecutor

    from splitlm.local import Generation, Ring

    with Ring(model, say=voice.say, **settings) as ring:
        prompts = [
            ring.codec.encode_chat([{"role": "user", "content": t}]) if chat else ring.codec.encode(t) for t in texts
        ]
        live = len(texts) == 1 and not as_json

        def one(ids: list[int]) -> Generation:
            return ring.generate(ids, on_text=(lambda piece: voice.out(piece, end="")) if live else None, **options)

        with ThreadPoolExecutor(len(prompts)) as pool:
            done = list(pool.map(one, prompts)) if len(prompts) > 1 else [one(prompts[0])]
    for text, result in zip(texts, done, strict=True):
        if as_json:
            voice.json(
                {
                    "prompt": text,
                    "text": result.text,
                    "tokens": result.tokens,
                    "finish": result.finish,
                    "prompt_tokens": result.prompt_tokens,
                }
            )
        elif not live:
            voice.out(f"── {text}\n{result.text}\n")
    if live:
        voice.out("")
        voice.say(f"{len(done[0].tokens)} tokens, ended by {done[0].finish}")


def run_first(
    voice: Console,
    model: str,
    *,
    prompt: str | None,
    max_new_tokens: int,
    layer_end: int | None,
    addresses: tuple[tuple[str, int], ...] | None,
    token: str,
    trace_dir: Path | None,
    deadline: float,
    threads: int,
    **settings: Any,
) -> None:
    """The first stage of a ring of fixed places, or a whole model (``stage --role full``)."""
    if prompt is None:
        raise UsageError("The first stage has no prompt", where="--prompt", expected="the text to go on from")
    settings |= {"token": token, "trace_dir": trace_dir, "deadline_s": deadline, "threads": o.ring_threads(threads, 1)}
    if addresses is not None:
        control, data, send = addresses
        settings |= {"listen": control, "data": data, "send": send, "static": layer_end}
    run_ring(voice, model, [prompt], settings, {"max_new_tokens": max_new_tokens}, False)


def _no_prompt() -> str:
    if sys.stdin.isatty():
        raise UsageError("There is no prompt", where="--prompt", expected="a text, or one on stdin")
    return sys.stdin.read()


def _positive(value: int, option: str) -> int:
    if value < 1:
        raise UsageError(f"It is {value}", where=option, expected="at least 1")
    return value
