"""``splitlm``: the verbs, and how errors end a process."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence

import typer

from splitlm.cli import bench, certs, check, demo, doctor, export, generate, plan, stage, train
from splitlm.cli.console import Console, ReaderGoneError
from splitlm.cli.interrupts import Interrupts
from splitlm.cli.verb import verb
from splitlm.core.errors import SplitlmError

app = typer.Typer(
    name="splitlm",
    help="Run one language model cut across the machines you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(verb(demo.demo))
app.command("plan")(verb(plan.plan))
app.command("generate")(verb(generate.generate))
app.command("stage")(verb(stage.stage))
app.command("train")(verb(train.train))
app.command("coordinator")(verb(train.coordinator))
app.command("client", context_settings=train.UNDERSCORES)(verb(train.client))
app.command("export")(verb(export.export))
app.command("certs")(verb(certs.certs))
app.add_typer(check.app, name="check")
app.add_typer(bench.app, name="bench")
app.command("doctor")(verb(doctor.doctor))
for group in (check.app, bench.app):
    for info in group.registered_commands:
        if info.callback is not None:
            info.callback = verb(info.callback)

# typer raises its command parser's errors, but exports only the leaf of their tree.
ArgumentsError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

STOPPED, READER_GONE = 130, 141
"""Exit codes as a shell would give them for SIGINT and SIGPIPE."""


def _version(asked: bool) -> None:
    if asked:
        import splitlm

        typer.echo(f"splitlm {splitlm.__version__}")
        raise typer.Exit()


@app.callback()
@verb
def common(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Run one language model cut across the machines you have."""
    _ = context, version


def run(arguments: Sequence[str] | None = None, interrupts: Interrupts | None = None) -> int:
    """Run one verb; what goes wrong becomes a paragraph on stderr. Returns the exit code.

    0 done · 1 a check failed · 2 usage or configuration · 3 a peer or network · 4 a model or data file · 130 Ctrl-C.

    Raises:
        SplitlmError: with ``--debug``, for its traceback.
    """
    voice = Console()
    try:
        code = app(arguments, prog_name="splitlm", standalone_mode=False, obj=voice)
        if code == STOPPED:  # typer turns Ctrl-C into this
            voice.error("stopped")
        return code if isinstance(code, int) else 0
    except SplitlmError as error:
        if interrupts is not None and interrupts.came:
            voice.error("stopped")
            return STOPPED
        if voice.debug:
            raise
        voice.error(str(error))
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        voice.error("stopped")
        return STOPPED
    except ReaderGoneError:
        return READER_GONE
    except ArgumentsError as error:
        voice.error(_usage(error))
        return 2
    finally:
        voice.done()


def _usage(error: Exception) -> str:
    """The parser's error as one paragraph."""
    if type(error).__name__ == "NoArgsIsHelpError":  # the help was shown
        return "There is no command."
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "splitlm"
    text = " ".join(error.format_message().split()).rstrip(".")  # type: ignore[attr-defined]
    return f"{text}{'' if text.endswith('?') else '.'} See {path} --help."


def main() -> None:
    """Entry point of the process."""
    missing = _fill_standard_streams()
    # Spinning OpenMP threads would take the core that the next stage computes on. torch reads this on import.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # what it warns of in a config is checked here
    interrupts = Interrupts()
    interrupts.install()
    if isinstance(sys.stdout, io.TextIOWrapper):  # text that the terminal's encoding lacks is no reason to stop
        sys.stdout.reconfigure(errors="backslashreplace")
    if missing:
        Console().error("stdout is closed. Expected a place for results. Use >/dev/null to drop them.")
        sys.exit(2)
    code = run(interrupts=interrupts)
    if code == READER_GONE:  # else the interpreter complains when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if code == STOPPED:
        # All is closed by now. Where the interrupt hit a library's start-up code, the interpreter's own end would
        # repeat the signal and change the exit code.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _fill_standard_streams() -> bool:
    """Put /dev/null where 0, 1 or 2 is closed, so that no socket takes that number; whether stdout was closed."""
    closed = [stream is None for stream in (sys.stdin, sys.stdout, sys.stderr)]
    while any(closed):
        match os.open(os.devnull, os.O_RDWR):
            case 0:
                sys.stdin = os.fdopen(0, "r")
            case 1:
                sys.stdout = os.fdopen(1, "w")
            case 2:
                sys.stderr = os.fdopen(2, "w")
            case spare:
                os.close(spare)
                break
    return closed[1]
