"""The keys of the configuration as a tree that can be walked: names in either spelling, the nearest of them, types."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher
from functools import cache

import msgspec
from msgspec import inspect

from splitlm.core.config_sections import MODEL_NAMES, Settings

Kind = inspect.Type


@cache
def fields_of(section: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    """The keys of a section, in order.

    Of :class:`Settings` for what derives from it, whose further fields are not keys.
    """
    known = inspect.type_info(Settings if issubclass(section, Settings) else section)
    return known.fields if isinstance(known, inspect.StructType) else ()


def bare(kind: Kind) -> tuple[Kind, bool, tuple[str, ...]]:
    """A key's type without wrapping, whether it may be null, and the words it takes (empty: any)."""
    nullable = False
    words: tuple[str, ...] = ()
    while isinstance(kind, inspect.Metadata | inspect.UnionType):
        if isinstance(kind, inspect.Metadata):
            words = tuple((kind.extra_json_schema or {}).get("enum", words))
            kind = kind.type
        else:
            nullable = any(isinstance(one, inspect.NoneType) for one in kind.types)
            kind = next(one for one in kind.types if not isinstance(one, inspect.NoneType))
    if isinstance(kind, inspect.LiteralType):
        words = tuple(str(value) for value in kind.values)
    return kind, nullable, words


def spelt(key: str) -> str:
    """A key in the spelling by which it is compared: an underscore is as good as a dash."""
    return key.replace("_", "-")


def find(section: type[msgspec.Struct], key: object) -> inspect.Field | None:
    """The field of a section that a key means, in either spelling."""
    wanted = spelt(key) if isinstance(key, str) else None
    return next((field for field in fields_of(section) if spelt(field.encode_name) == wanted), None)


def likeness(one: str, other: str) -> float:
    """How alike two names are, from 0 to 1; case and dashes do not count."""
    return SequenceMatcher(None, spelt(one).casefold(), spelt(other).casefold(), autojunk=False).ratio()


def nearest(word: str, words: tuple[str, ...]) -> str:
    """The most alike of some words, the first of equals."""
    return max(words, key=lambda other: likeness(word[:80], other))


@cache
def every_path(section: type[msgspec.Struct] = Settings, above: str = "") -> tuple[str, ...]:
    """The path of every key and section. A model's name, which is free, stands as ``<name>``."""

    def paths() -> Iterator[str]:
        for field in fields_of(section):
            path = f"{above}{field.encode_name}"
            yield path
            kind, _, _ = bare(field.type)
            if isinstance(kind, inspect.StructType):
                yield from every_path(kind.cls, f"{path}.")
            elif isinstance(kind, inspect.DictType) and isinstance(kind.value_type, inspect.StructType):
                yield from every_path(kind.value_type.cls, f"{path}.<name>.")

    return tuple(paths())


def nearest_path(section: type[msgspec.Struct], above: str, key: str) -> str:
    """The known key nearest to an unknown one: of that very name elsewhere, a neighbour, one like it elsewhere, any.

    Args:
        section: which the unknown key stands in.
        above: the path of that section; empty for the whole file.
        key: any text, dots too.
    """
    path = f"{above}.{key}" if above else key
    same = [other for other in every_path() if likeness(key, other.rpartition(".")[2]) == 1]
    if same:
        return max(same, key=lambda other: likeness(path, other))
    here = tuple(field.encode_name for field in fields_of(section))
    best = nearest(key, here)
    if likeness(key, best) >= 0.6:
        return f"{above}.{best}" if above else best
    best = max(every_path(), key=lambda other: likeness(key, other.rpartition(".")[2]))
    if likeness(key, best.rpartition(".")[2]) >= 0.6:
        return best
    return nearest(path, every_path())


def model_key(name: str) -> str:
    """A model's name as the table of limits has it: the well-known three in any case, others as they are."""
    return next((known for known in MODEL_NAMES if known.casefold() == name.casefold()), name)


def mistaken_model(name: str) -> str:
    """The well-known name that a name looks like and is not, or nothing: a path and a hub id look like none."""
    if model_key(name) in MODEL_NAMES or any(mark in name for mark in "/\\.~"):
        return ""
    best = nearest(name, MODEL_NAMES)
    return best if likeness(name, best) >= 0.75 else ""


def plain(value: object) -> object:
    """A section as plain mappings and lists with the names that a file uses."""
    return msgspec.to_builtins(value)
