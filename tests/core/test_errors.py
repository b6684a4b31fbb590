"""Errors: one paragraph, one exit code, one tree drawn as it is."""

from __future__ import annotations

import copy
import inspect
import re

import pytest

from splitlm.core import errors
from splitlm.core.errors import ModelError, NetworkError, SplitlmError, UsageError, from_exit_code

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, SplitlmError)]


def test_a_message_is_one_paragraph_of_what_where_expected_and_remedy() -> None:
    error = SplitlmError("Port 7000 is taken", where="host:7000", expected="a free port", remedy="Choose\n  another")
    assert str(error) == "host:7000: Port 7000 is taken. Expected a free port. Choose another."
    assert str(SplitlmError("It broke")) == "It broke."


@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.__name__)
def test_exit_codes_follow_the_tree(kind: type[SplitlmError]) -> None:
    families = {UsageError: 2, NetworkError: 3, ModelError: 4}
    expected = next((code for base, code in families.items() if issubclass(kind, base)), 1)
    assert kind.exit_code == expected
    assert kind.__doc__


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn: list[tuple[str, str]] = []
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"^    ([│ ]*(?:[├└]── )?)(\w+Error)\b", line):
            depth = len(found[1]) // 4
            path[depth:] = [found[2]]
            if depth:
                drawn.append((path[depth - 1], found[2]))
    real = [(c.__bases__[0].__name__, c.__name__) for c in CLASSES if c is not SplitlmError]
    assert sorted(drawn) == sorted(real)


@pytest.mark.parametrize(("code", "kind"), [(1, SplitlmError), (2, UsageError), (3, NetworkError), (4, ModelError)])
def test_a_peers_error_keeps_its_code_and_its_words(code: int, kind: type[SplitlmError]) -> None:
    told = str(kind("The file is cut short", where="a.safetensors", expected="8 bytes more"))
    error = from_exit_code(code, told)
    assert type(error) is kind
    assert error.exit_code == code
    assert str(error) == told


def test_an_error_survives_copying() -> None:
    error = UsageError("Odd", where="--x", expected="y", remedy="Do z")
    assert str(copy.copy(error)) == str(error)
    assert copy.copy(error).expected == "y"
