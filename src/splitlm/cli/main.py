"""``splitlm``: the verbs, what is common to them, and how errors end a process."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

import typer

from splitlm.cli import bench, check, demo, doctor, generate, plan, stage
from splitlm.cli.console import Console
from splitlm.core.errors import SplitlmError

app = typer.Typer(
    name="splitlm",
    help="Run one language model cut across the machines you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.command("plan")(plan.plan)
app.command("generate")(generate.generate)
app.command("stage")(stage.stage)
app.add_typer(check.app, name="check")
app.add_typer(bench.app, name="bench")
app.command("doctor")(doctor.doctor)

# typer raises its command parser's errors, but exports only the leaf of their tree.
ArgumentsError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def _version(asked: bool) -> None:
    if asked:
        import splitlm

        typer.echo(f"splitlm {splitlm.__version__}")
        raise typer.Exit()


@app.callback()
def common(
    context: typer.Context,
    log_level: str = typer.Option("warning", help="Least level of log lines: debug, info, warning or error."),
    log_json: bool = typer.Option(False, "--log-json", help="Log lines as JSON."),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Results only: no progress."),
    debug: bool = typer.Option(False, "--debug", help="Show a traceback with an error."),
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Options that every verb takes."""
    _ = version
    context.obj = Console(log_level=log_level, log_json=log_json, quiet=quiet, debug=debug)


def main() -> None:
    """Entry point: runs a verb and turns its error into one paragraph and an exit code.

    0 done · 1 a check failed · 2 usage or configuration · 3 a peer or the network · 4 a model or data file · 130 Ctrl-C.
    """
    # Spinning OpenMP threads would take the core that the next stage computes on. torch reads this on import.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    signal.signal(signal.SIGTERM, _terminated)
    debug = "--debug" in sys.argv
    code = 0
    try:
        app(standalone_mode=False)
    except SplitlmError as error:
        if debug:
            raise
        print(f"splitlm: {error}", file=sys.stderr)
        code = error.exit_code
    except typer.Exit as error:
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print("splitlm: stopped", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        # The reader of our output went away (``| head``): that is its right.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except ArgumentsError as error:
        error.show()  # type: ignore[attr-defined]
        code = 2
    sys.exit(code)


def _terminated(_: int, __: FrameType | None) -> None:
    """SIGTERM ends like Ctrl-C: in order, with every process and port freed."""
    raise KeyboardInterrupt
