"""The JSON Schema of the configuration, for editors that complete and check YAML."""

from __future__ import annotations

from typing import Any

import msgspec

from splitlm.core.config_sections import Settings
from splitlm.core.config_tree import spelt

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema() -> dict[str, Any]:
    """A schema of the whole file. Keys are offered as the documentation spells them and taken in either spelling."""
    made = msgspec.json.schema(Settings)
    for section in made["$defs"].values():
        # A property completes; a pattern is only checked: nobody is offered the same key twice.
        others = {other: part for key, part in section["properties"].items() for other in _others(key)}
        if others:
            section["patternProperties"] = others
        section.pop("required", None)
    return {"$schema": DIALECT, "title": "splitlm run", **made}


def _others(key: str) -> list[str]:
    """A pattern for a key's further spellings: any mix of dashes and underscores but its own."""
    if spelt(key) == key and "-" not in key:
        return []
    return [f"^(?!{key}$){spelt(key).replace('-', '[-_]')}$"]
