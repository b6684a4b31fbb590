"""How a verb's function becomes a command: groups of options as dataclasses, and the options that every verb takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from splitlm.cli.console import Console

PANEL = "Every verb"


@dataclass(frozen=True)
class EveryVerb:
    """Options that stand before the verb or after it; None where they were not given."""

    log_level: Annotated[
        str | None,
        typer.Option(
            help="Least level of log lines: debug, info, warning (default) or error.",
            metavar="LEVEL",
            rich_help_panel=PANEL,
            show_default=False,
        ),
    ] = None
    log_json: Annotated[
        bool | None, typer.Option("--log-json", help="Log lines as JSON.", rich_help_panel=PANEL, show_default=False)
    ] = None
    quiet: Annotated[
        bool | None,
        typer.Option(
            "--quiet", "-q", help="Results and errors only: no progress.", rich_help_panel=PANEL, show_default=False
        ),
    ] = None
    debug: Annotated[
        bool | None,
        typer.Option("--debug", help="Show a traceback with an error.", rich_help_panel=PANEL, show_default=False),
    ] = None


def verb(function: Callable[..., Any]) -> Callable[..., Any]:
    """What typer is to see of a verb's function.

    Each parameter annotated with a dataclass becomes that dataclass's fields, which are options of their own; the
    function gets the dataclass. The options of ``EveryVerb`` are added, and told to the console.
    """
    hints = get_type_hints(function, include_extras=True)
    hints.pop("return", None)
    given = inspect.signature(function).parameters
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    wants_context = "context" in given
    shown = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for name, parameter in given.items():
        if name in groups:
            shown += _parameters(groups[name])
        elif name != "context":
            shown.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]))
    shown += _parameters(EveryVerb)

    @wraps(function)
    def command(**values: Any) -> Any:
        context = values["context"] if wants_context else values.pop("context")
        tell(context, _take(EveryVerb, values))
        for name, group in groups.items():
            values[name] = _take(group, values)
        return function(**values)

    command.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return command


def tell(context: typer.Context, given: EveryVerb) -> None:
    """Give the console what was asked for; what was not given stays as it is."""
    if context.obj is None:
        context.obj = Console()
    context.obj.set(**{f.name: getattr(given, f.name) for f in fields(given) if getattr(given, f.name) is not None})


def _parameters(group: Any) -> list[inspect.Parameter]:
    hints: Mapping[str, Any] = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(group)
    ]


def _take(group: Any, values: dict[str, Any]) -> Any:
    return group(**{f.name: values.pop(f.name) for f in fields(group)})
