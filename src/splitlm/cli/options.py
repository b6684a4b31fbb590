"""Options that several verbs share, one by one and in groups, and how addresses, tokens and cuts are read.

A verb takes a group by a parameter with its type (``ring: o.RingOptions``); see ``cli.verb``.
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from splitlm.cli.certs import TlsFolder, tls_folder
from splitlm.core.engines import ENGINES
from splitlm.core.errors import UsageError
from splitlm.core.sampling import Sampling as SamplingSettings
from splitlm.core.shifts import Shift

MODEL_HELP = "Hub id, directory, .gguf file, or smollm2-135m."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
Stages = Annotated[int | None, typer.Option(help="Number of stages, the head included.")]
Cuts = Annotated[str, typer.Option(help="Block boundaries instead of balanced ones, such as 6,11.")]
Private = Annotated[bool, typer.Option("--private", help="Keep norm and head here: no other machine sees a token.")]
TailBlocks = Annotated[int, typer.Option(help="With --private: final blocks that stay here too.")]
FamilyName = Annotated[str, typer.Option("--model-family", help="Layout of the model, where it is not detected.")]
LoaderName = Annotated[str, typer.Option("--loader", help="shard: read only our tensors. hf: load all, then drop.")]
DTypeName = Annotated[str, typer.Option("--dtype", help="auto (the checkpoint's own), float32, bfloat16 or float16.")]
Compute = Annotated[
    str,
    typer.Option(
        help="Compute engine, or one for each stage with commas: exact (transformers untouched), fast (float16 "
        "weights), int8, int4. Default: fast to generate, exact to check and to measure."
    ),
]
Threads = Annotated[int, typer.Option(help="Threads per stage; 0: this machine's cores, shared among its stages.")]
PrefillChunk = Annotated[int, typer.Option(help="Prompt tokens per prefill step.")]
Deadline = Annotated[float, typer.Option(help="Seconds to wait for stages and neighbours.")]
CtrlTimeout = Annotated[
    float,
    typer.Option(help="Seconds that a barrier waits; who is silent for twice that is lost. The same everywhere."),
]
Window = Annotated[int, typer.Option(help="Tokens between two barriers, at which blocks may move; 0 for none.")]
ShiftAt = Annotated[
    list[int] | None,
    typer.Option(help="forced-shift: at the first window boundary from this token on. Several: in this order."),
]
PLANS = ("noop", "forced-shift", "auto")
PlanName = Annotated[
    str,
    typer.Option(help="noop, forced-shift (with --shift-at), or auto: blocks move where that pays (default: noop)."),
]
Horizon = Annotated[int, typer.Option(help="auto: tokens within which a move must pay.")]
ShiftBoundary = Annotated[
    list[int] | None, typer.Option(help="forced-shift: the boundary that moves, of stages s-1 and s (default: 1).")
]
ShiftK = Annotated[
    list[int] | None,
    typer.Option(help="forced-shift: blocks that stage s-1 takes from s; below 0, gives to it (default: 1)."),
]
TokenFile = Annotated[Path | None, typer.Option(help="File with the join secret (or set SPLITLM_TOKEN).")]
TraceDir = Annotated[
    Path | None,
    typer.Option(help="Folder for traces and logs, in place of an older run's (default: runs/<time>-<verb>)."),
]
NoTrace = Annotated[bool, typer.Option("--no-trace", help="Write no trace.")]
RunLabel = Annotated[str, typer.Option(help="A word for the run's folder name.")]
AsJson = Annotated[bool, typer.Option("--json", help="The result as JSON.")]


@dataclass(frozen=True)
class CutOptions:
    """Where to cut a model."""

    stages: Stages = None
    cuts: Cuts = ""
    private: Private = False
    tail_blocks: TailBlocks = 0
    family: FamilyName = ""
    dtype: DTypeName = "auto"

    def settings(self, default_stages: int = 1) -> dict[str, Any]:
        """Arguments of ``splitlm.plan`` and of ``Ring``.

        Raises:
            UsageError: cuts that are no numbers, or that do not agree with the number of stages.
        """
        boundaries = cut_list(self.cuts)
        count = default_stages if self.stages is None else at_least(1, self.stages, "--stages")
        if boundaries is not None:
            if self.stages not in (None, len(boundaries) + 1):
                raise UsageError(
                    f"--stages {self.stages} and --cuts {self.cuts} do not agree",
                    expected=f"{len(boundaries) + 1} stages for these cuts",
                    remedy="Leave one of the two out",
                )
            count = len(boundaries) + 1
        return {
            "stages": count,
            "cuts": boundaries,
            "private": self.private,
            "tail_blocks": at_least(0, self.tail_blocks, "--tail-blocks"),
            "family": self.family,
            "dtype": choice(self.dtype, ("auto", "float32", "bfloat16", "float16"), "--dtype"),
        }


@dataclass(frozen=True)
class RingOptions(CutOptions):
    """A ring: where to cut, how to load and compute, how long to wait, whom to let in."""

    loader: LoaderName = "shard"
    compute: Compute = ""
    threads: Threads = 0
    prefill_chunk: PrefillChunk = 128
    deadline: Deadline = 60.0
    ctrl_timeout: CtrlTimeout = 5.0
    window: Window = 20
    plan: PlanName = ""
    horizon: Horizon = 1000
    shift_at: ShiftAt = None
    shift_boundary: ShiftBoundary = None
    shift_k: ShiftK = None
    token_file: TokenFile = None
    tls: TlsFolder = ""

    def settings(
        self, default_stages: int = 1, *, listen: tuple[str, int] | None = None, engine: str = "exact"
    ) -> dict[str, Any]:
        """Arguments of ``Ring``, the token and the trace's folder left out: what may be written down.

        Args:
            default_stages: where neither stages nor cuts were given.
            engine: where none was asked for.
            listen: where other machines join; None starts all stages here, and they share the cores.
        """
        cut = super().settings(default_stages)
        return {
            **cut,
            "loader": choice(self.loader, ("shard", "hf"), "--loader"),
            "compute": self._engines(engine, cut["stages"]),
            # A machine that joins may have fewer cores than this one, so that it is not told how many to use.
            "threads": at_least(0, self.threads, "--threads") if listen else ring_threads(self.threads, cut["stages"]),
            "prefill_chunk": at_least(1, self.prefill_chunk, "--prefill-chunk"),
            "listen": listen,
            "tls": tls_folder(self.tls, *([listen] if listen else [])),
            "deadline_s": seconds(self.deadline, "--deadline"),
            "ctrl_timeout_s": seconds(self.ctrl_timeout, "--ctrl-timeout"),
            "window": at_least(0, self.window, "--window"),
            **self._moves(cut["stages"]),
        }

    def _engines(self, default: str, stages: int) -> str | tuple[str, ...]:
        """The engine of all stages, or each one's.

        Raises:
            UsageError: one that there is not, or not one for each stage.
        """
        names = [choice(name.strip(), ENGINES, "--compute") for name in (self.compute or default).split(",")]
        if len(names) not in (1, stages):
            raise UsageError(
                f"{len(names)} engines are named",
                where="--compute",
                expected=f"one, or one for each of {stages} stages",
            )
        return names[0] if len(names) == 1 else tuple(names)

    def _moves(self, stages: int) -> dict[str, Any]:
        """What the plan adds to the settings: nothing, or the moves that were asked for.

        Raises:
            UsageError: moves without their plan, the plan without moves, or where nothing can move.
        """
        plan = choice(self.plan or ("forced-shift" if self.shift_at else "noop"), PLANS, "--plan")
        given = [("--shift-at", self.shift_at), ("--shift-boundary", self.shift_boundary), ("--shift-k", self.shift_k)]
        if plan != "forced-shift":
            for option, value in given:
                if value:
                    raise UsageError(
                        f"The plan is {plan}, and this is for forced-shift",
                        where=option,
                        remedy="Leave one of them out",
                    )
            if plan == "noop":
                return {}
        elif not self.shift_at:
            raise UsageError(
                "It is not said when blocks are to move", where="--plan forced-shift", expected="--shift-at with it"
            )
        if not self.window:
            raise UsageError("Blocks move between two windows, and there are none", where="--window 0")
        if stages == 1:
            raise UsageError(
                "A ring of one stage has no boundary that could move",
                where=f"--plan {plan}",
                remedy="Use --stages 2 or more",
            )
        if plan == "auto":
            return {"plan": "auto", "horizon": at_least(1, self.horizon, "--horizon")}
        return {"shifts": shift_list(self.shift_at or [], self.shift_boundary or [1], self.shift_k or [1])}

    @property
    def token(self) -> str:
        """The join secret; see ``read_token``."""
        return read_token(self.token_file)


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen."""

    temperature: Annotated[float, typer.Option(help="0 is greedy, the only reproducible mode.")] = 0.0
    top_k: Annotated[int, typer.Option(help="Keep the k most probable tokens; 0 keeps all.")] = 0
    top_p: Annotated[float, typer.Option(help="Keep the smallest set of tokens with this probability.")] = 1.0
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the best one's probability.")] = 0.0
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens already seen become less probable.")] = 1.0
    seed: Annotated[int | None, typer.Option(help="Of the random choice; drawn when absent.")] = None

    def settings(self) -> SamplingSettings:
        """As the ring takes them.

        Raises:
            UsageError: a value out of range.
        """
        return SamplingSettings(**vars(self))


def address(text: str, option: str) -> tuple[str, int]:
    """``HOST:PORT`` as a pair; ``[::1]:80`` for IPv6.

    Raises:
        UsageError: not of this form, or a port out of range.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535 or not host:
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


def shift_list(at: list[int], boundary: list[int], k: list[int]) -> tuple[Shift, ...]:
    """Moves, in order; a boundary or number of blocks that is given once holds for all.

    Raises:
        UsageError: a token below 1, or not one value for each token.
    """
    for option, values in (("--shift-boundary", boundary), ("--shift-k", k)):
        if len(values) not in (1, len(at)):
            raise UsageError(
                f"{len(values)} values for {len(at)} moves", where=option, expected=f"one, or {len(at)} of them"
            )
    several = (boundary * len(at) if len(boundary) == 1 else boundary, k * len(at) if len(k) == 1 else k)
    return tuple(Shift(at_least(1, t, "--shift-at"), s, n) for t, s, n in zip(at, *several, strict=True))


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
        raise UsageError(f"{value!r} is not allowed", where=option, expected=f"one of {', '.join(allowed)}")
    return value


def at_least(least: int, value: int, option: str) -> int:
    """A count that is not too small.

    Raises:
        UsageError: it is.
    """
    if value < least:
        raise UsageError(f"It is {value}", where=option, expected=f"at least {least}")
    return value


def seconds(value: float, option: str) -> float:
    """A span of time.

    Raises:
        UsageError: not a positive number.
    """
    if not (value > 0 and math.isfinite(value)):
        raise UsageError(f"It is {value}", where=option, expected="a positive number of seconds")
    return value


def texts(prompts: list[str] | None) -> list[str]:
    """Prompts as they were given; ``-`` is stdin, and so is no prompt at all where stdin is not a terminal.

    The line end with which ``echo`` and editors close a text is not part of the prompt.

    Raises:
        UsageError: there is none, or stdin is not text.
    """
    if not prompts and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError("There is no prompt", where="--prompt", expected="a text, or one on stdin")
    try:
        return [sys.stdin.read().removesuffix("\n") if text == "-" else text for text in prompts or ["-"]]
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not text ({error})", where="--prompt -", expected="UTF-8") from error


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ring_threads(threads: int, local_stages: int) -> int:
    """Threads per stage: as asked, or this machine's cores shared among the stages that run on it.

    Raises:
        UsageError: a negative number.
    """
    return at_least(0, threads, "--threads") or max(1, cores() // max(1, local_stages))
