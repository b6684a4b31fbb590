"""Draws the table of settings in the manual: ``python -m tests.house.settings_table`` (``make tree``) writes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from splitlm.core.config import schema

from .source import ROOT

PAGE = "docs/finetune.md"
BEGIN, END = "<!-- settings:begin -->", "<!-- settings:end -->"


def drawn() -> str:
    """Every key with its type, its default and what it means."""
    whole = schema()
    return "\n".join(["| key | type | default | what it is |", "|---|---|---|---|", *_rows(whole["$defs"], whole, "")])


def _rows(defs: dict[str, Any], part: dict[str, Any], path: str) -> Iterator[str]:
    if "$ref" in part:
        part = defs[part["$ref"].rpartition("/")[2]] | {k: v for k, v in part.items() if k != "$ref"}
    for key, inner in part.get("properties", {}).items():
        at = f"{path}.{key}" if path else key
        below = _below(defs, inner)
        if below is not None:
            named = inner.get("type") == "object" and "additionalProperties" in inner
            yield from _rows(defs, below, f"{at}.NAME" if named else at)
        else:
            shown = f"{path}.`{key}`" if path else f"`{key}`"
            yield f"| {shown} | {_kind(inner)} | {_default(inner.get('default'))} | {inner.get('description', '')} |"


def _below(defs: dict[str, Any], inner: dict[str, Any]) -> dict[str, Any] | None:
    """The section that a key holds; None where it holds a value."""
    for part in (inner, inner.get("additionalProperties", {}), *inner.get("anyOf", [])):
        if isinstance(part, dict) and "$ref" in part:
            found: dict[str, Any] = defs[part["$ref"].rpartition("/")[2]]
            return found
    return None


def _kind(inner: dict[str, Any]) -> str:
    if "enum" in inner:
        return " · ".join(str(word) for word in inner["enum"] if word is not None)
    if "anyOf" in inner:
        return " or ".join(_kind(part) for part in inner["anyOf"] if part.get("type") != "null")
    if inner.get("type") == "array":
        return "two whole numbers"
    names = {"integer": "whole number", "number": "number", "string": "text", "boolean": "True · False"}
    limits = [
        f"{sign} {inner[key]}"
        for key, sign in (("exclusiveMinimum", ">"), ("minimum", "≥"), ("maximum", "≤"))
        if key in inner and abs(inner[key]) < 2**62
    ]
    return " ".join([names[inner["type"]], *limits])


def _default(value: object) -> str:
    return "" if value is None else f"`{value}`"


def write() -> None:
    """Put the table between its two marks."""
    page = ROOT / PAGE
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{drawn()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    write()
