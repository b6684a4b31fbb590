"""Options that several verbs share, and how addresses, tokens and cuts are read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from splitlm.core.errors import UsageError

MODEL_HELP = "Hub id, directory, .gguf file, or smollm2-135m."
Model = Annotated[str, typer.Argument(help=MODEL_HELP)]
Stages = Annotated[int | None, typer.Option(help="Number of stages, the head included.")]
Cuts = Annotated[str, typer.Option(help="Block boundaries instead of balanced ones, such as 6,11.")]
Private = Annotated[bool, typer.Option("--private", help="Keep norm and head here: no other machine sees a token.")]
TailBlocks = Annotated[int, typer.Option(help="With --private: final blocks that stay here too.")]
FamilyName = Annotated[str, typer.Option("--model-family", help="Layout of the model, where it is not detected.")]
LoaderName = Annotated[str, typer.Option("--loader", help="shard: read only our tensors. hf: load all, then drop.")]
DTypeName = Annotated[str, typer.Option("--dtype", help="auto (the checkpoint's own), float32, bfloat16 or float16.")]
Compute = Annotated[str, typer.Option(help="Compute engine: exact.")]
Threads = Annotated[int, typer.Option(help="Threads per stage; 0 shares this machine's cores among its stages.")]
PrefillChunk = Annotated[int, typer.Option(help="Prompt tokens per prefill step.")]
Deadline = Annotated[float, typer.Option(help="Seconds to wait for stages and neighbours.")]
TokenFile = Annotated[Path | None, typer.Option(help="File with the join secret (or set SPLITLM_TOKEN).")]
TraceDir = Annotated[
    Path | None, typer.Option(help="Folder for the run's trace and logs [default: runs/<time>-<verb>].")
]
NoTrace = Annotated[bool, typer.Option("--no-trace", help="Write no trace.")]
RunLabel = Annotated[str, typer.Option(help="A word for the run's folder name.")]


def address(text: str, option: str) -> tuple[str, int]:
    """``HOST:PORT`` as a pair; ``[::1]:80`` for IPv6.

    Raises:
        UsageError: not of this form, or a port out of range.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isdigit() or int(port) > 65535 or not host:
        raise UsageError(f"{text!r} is no address", where=option, expected="HOST:PORT, such as 192.168.1.5:7000")
    return host, int(port)


def cut_list(text: str) -> tuple[int, ...] | None:
    """``6,11`` as numbers; None for an empty text.

    Raises:
        UsageError: not numbers.
    """
    if not text:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{text!r} are no cuts", where="--cuts", expected="block indices, such as 6,11") from None


def read_token(path: Path | None) -> str:
    """The join secret from a file, else from the environment, else empty.

    Raises:
        UsageError: the file cannot be read or is empty.
    """
    if path is None:
        return os.environ.get("SPLITLM_TOKEN", "")
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The file cannot be read ({error})", where=f"--token-file {path}") from error
    if not token:
        raise UsageError("The file is empty", where=f"--token-file {path}", expected="the join secret")
    return token


def choice(value: str, allowed: tuple[str, ...], option: str) -> str:
    """A value out of a few.

    Raises:
        UsageError: another one.
    """
    if value not in allowed:
        raise UsageError(f"{value!r} is not allowed", where=option, expected=", ".join(allowed))
    return value


def ring_threads(threads: int, local_stages: int) -> int:
    """Threads per stage: as asked, or this machine's cores shared among the stages that run on it."""
    if threads < 0:
        raise UsageError(f"{threads} threads", where="--threads", expected="0 or more")
    return threads or max(1, len(os.sched_getaffinity(0)) // max(1, local_stages))
