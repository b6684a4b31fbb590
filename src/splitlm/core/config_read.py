"""From a mapping, as a YAML file gives it, to settings: names and types; ranges are ``config_check``'s."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import msgspec
from msgspec import inspect

from splitlm.core.config_sections import MODEL_NAMES, Settings
from splitlm.core.config_tree import Kind, bare, find, mistaken_model, model_key, nearest_path, spelt
from splitlm.core.errors import UsageError

_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_SECRET = ("rabbit", "rabbit.password")
_NAMES: tuple[tuple[type[Kind], str], ...] = (
    (inspect.BoolType, "true or false"),
    (inspect.IntType, "a whole number"),
    (inspect.FloatType, "a finite number"),
    (inspect.StrType, "text (in quotes, if it looks like something else)"),
    (inspect.TupleType, "a list of two whole numbers"),
)


class Reading:
    """One walk over a mapping. ``given`` collects the paths it sets, spelt as the documentation spells them."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.given: list[str] = []

    def section(self, value: object, kind: type[msgspec.Struct], path: str) -> dict[str, object]:
        """The attributes of a section that a mapping sets. An empty section (``rabbit:``) sets none."""
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self._wrong(value, path, "a section: a mapping of keys to values")
        found: dict[str, object] = {}
        for key, inner in value.items():
            field = find(kind, key)
            if field is None:
                self._unknown(kind, key, path)
            at = _join(path, field.encode_name)
            if field.name in found:
                raise UsageError(
                    f"{at} is set twice",
                    where=f"{self.where}:{at}",
                    expected="one spelling, with dashes or underscores",
                )
            found[field.name] = self.value(inner, field.type, at)
        return found

    def value(self, value: object, kind: Kind, path: str) -> object:
        """A key's value in its type, or a section."""
        self.given.append(path)
        inner, nullable, words = bare(kind)
        if isinstance(inner, inspect.StructType):
            return inner.cls(**self.section(value, inner.cls, path))
        if isinstance(inner, inspect.DictType):
            return self._table(value, inner, path)
        if value is None and nullable:
            return None
        if isinstance(value, bool) and "off" in words:
            value = "on" if value else "off"  # YAML 1.1 reads a bare on or off as a truth value
        if isinstance(value, str) and isinstance(inner, inspect.FloatType) and _EXPONENT.fullmatch(value):
            value = float(value)  # YAML 1.1 reads 1e-5, which has no dot, as text
        return self._leaf(value, inner, words, path)

    def _leaf(self, value: object, kind: Kind, words: tuple[str, ...], path: str) -> object:
        if words:
            if not isinstance(value, str):
                self._wrong(value, path, "one of " + ", ".join(words))
            return value
        types: dict[type[Kind], object] = {
            inspect.BoolType: bool,
            inspect.IntType: int,
            inspect.FloatType: float,
            inspect.StrType: str,
            inspect.TupleType: tuple[int, int],
        }
        expected = next(name for known, name in _NAMES if isinstance(kind, known))
        try:
            found = msgspec.convert(value, types[type(kind)])
        except (msgspec.ValidationError, OverflowError):
            self._wrong(value, path, expected)
        if isinstance(found, float) and not math.isfinite(found):
            self._wrong(value, path, expected)
        return found

    def _table(self, value: object, kind: inspect.DictType, path: str) -> dict[str, object]:
        """``server.model``: sections under names of models."""
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self._wrong(value, path, "a mapping of model names to sections")
        found: dict[str, object] = {}
        for key, inner in value.items():
            name = model_key(key) if isinstance(key, str) else shown(key)
            at = _join(path, name)
            meant = mistaken_model(name) if isinstance(key, str) else MODEL_NAMES[0]
            if meant:
                raise UsageError(
                    f"No code knows the model {name!r}",
                    where=f"{self.where}:{at}",
                    expected=f"{', '.join(MODEL_NAMES)}, a path or a hub id",
                    remedy=f"The nearest known key is {_join(path, meant)}",
                )
            if name in found:
                raise UsageError(f"{at} is set twice", where=f"{self.where}:{at}", expected="a model once")
            found[name] = self.value(inner, kind.value_type, at)
        return found

    def _unknown(self, kind: type[msgspec.Struct], key: object, path: str) -> NoReturn:
        name = key if isinstance(key, str) else shown(key)
        at = _join(path, name[:80])
        raise UsageError(
            f"No code knows the key {at!r}",
            where=f"{self.where}:{at}",
            remedy=f"The nearest known key is {nearest_path(kind, path, name[:80])}",
        )

    def _wrong(self, value: object, path: str, expected: str) -> NoReturn:
        what = "is of another type" if path in _SECRET else f"cannot be {shown(value)}"
        raise UsageError(f"{path} {what}", where=f"{self.where}:{path}", expected=expected)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def shown(value: object) -> str:
    """A value in a message: short, whatever it is, since an alias in a YAML file can make a small list huge."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, str | bytes | bool | float | None):
        text = repr(value[:60] if isinstance(value, str | bytes) else value)
    elif isinstance(value, int):
        text = repr(value) if value.bit_length() < 256 else "a huge number"
    elif isinstance(value, Sequence) and len(value) <= 6 and not any(isinstance(one, Sequence) for one in value):
        text = f"[{', '.join(shown(one) for one in value)}]"
    elif isinstance(value, Sequence):
        text = f"a list of {len(value)}"
    else:
        text = type(value).__name__
    return text


def override(
    mapping: Mapping[str, object] | None, assignments: Sequence[str], parse: Callable[[str], object]
) -> dict[str, object]:
    """A mapping with some keys set anew, as ``--set a.b=c`` asks; the one given is left as it is.

    Args:
        mapping: what the file holds.
        assignments: ``path=value`` each; a path in either spelling. Later ones win.
        parse: reads a value as YAML reads a scalar.

    Raises:
        UsageError: not ``path=value``, a key that no code knows, or a value of the wrong type.
    """
    changed: dict[str, object] = dict(mapping or {})
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path.strip():
            raise UsageError(
                "There is nothing to set", where="--set", expected="KEY=VALUE, as in server.global-round=3"
            )
        _set(changed, path.strip(), parse(text), Reading("--set"))
    return changed


def _set(changed: dict[str, object], path: str, value: object, reading: Reading) -> None:
    """Put a value at a path, copying every section on the way down; the walk also proves name and type."""
    at: dict[str, object] = changed
    kind: type[msgspec.Struct] = Settings
    rest, done = path, ""
    while True:
        key, _, rest = rest.partition(".")
        field = find(kind, key)
        if field is None:
            reading.section({key: None}, kind, done)  # raises: it says what is near
            return
        done = _join(done, field.encode_name)
        inner, _, _ = bare(field.type)
        if not rest or not isinstance(inner, inspect.StructType | inspect.DictType):
            break
        at = _below(at, _present(at, field.encode_name), reading, done)
        if isinstance(inner, inspect.StructType):
            kind = inner.cls
        elif isinstance(inner.value_type, inspect.StructType):
            name, _, rest = rest.rpartition(".")  # a model's name may hold dots
            if not name:
                raise UsageError(f"{_join(done, rest)} names no key", where=reading.where, expected=f"{done}.NAME.KEY")
            reading.value({name: None}, inner, done)
            name = next((old for old in at if model_key(str(old)) == model_key(name)), name)
            done = _join(done, name)
            at, kind = _below(at, name, reading, done), inner.value_type.cls
    if rest:
        raise UsageError(f"{done} is a value and has no keys", where=reading.where, expected=f"{done}=VALUE")
    reading.value(value, field.type, done)
    at[_present(at, field.encode_name)] = value


def _present(at: Mapping[str, object], key: str) -> str:
    """The spelling in which a mapping has a key already, or the key."""
    return next((old for old in at if isinstance(old, str) and spelt(old) == spelt(key)), key)


def _below(at: dict[str, object], key: str, reading: Reading, path: str) -> dict[str, object]:
    """The section under a key, copied so that it can be changed."""
    inner = at.get(key)
    if inner is not None and not isinstance(inner, Mapping):
        raise UsageError(f"{path} is not a section in the file", where=reading.where, expected="a mapping there")
    copied = dict(inner or {})
    at[key] = copied
    return copied
