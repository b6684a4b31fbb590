"""Rules 4 to 6: what no file of the package may hold."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from .source import DOCS, PACKAGE, ROOT, files, importing, name, tree

MUTATORS = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "discard", "clear"}
CONTAINERS = {
    "list",
    "dict",
    "set",
    "bytearray",
    "defaultdict",
    "deque",
    "OrderedDict",
    "Counter",
    "WeakValueDictionary",
}
LITERALS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of a call's function; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def violations(module: ast.Module) -> list[tuple[int, str]]:
    """Rule 4 and 5 in one file: (line, what)."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(module):
        match node:
            case ast.Assert():
                found.append((node.lineno, "assert: raise an error of core/errors"))
            case ast.ExceptHandler(type=None):
                found.append((node.lineno, "a bare except"))
            case ast.Global():
                found.append((node.lineno, "a global statement"))
            case ast.Call():
                called = dotted(node.func)
                if called in {"eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec"}:
                    found.append((node.lineno, f"{called}()"))
                if called in {"torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "numpy.load", "np.load"}:
                    found.append((node.lineno, f"{called}()"))
            case _:
                pass
    names = set()
    for node in module.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = getattr(node, "value", None)
        for target in targets:
            if isinstance(target, ast.Name):
                names.add(target.id)
                container = isinstance(value, LITERALS) or (
                    isinstance(value, ast.Call) and dotted(value.func).split(".")[-1] in CONTAINERS
                )
                if container and not target.id.strip("_").isupper() and not re.fullmatch(r"__\w+__", target.id):
                    found.append((node.lineno, f"a mutable module global: {target.id}"))
    for node in ast.walk(module):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=method)) if (
                owner in names and owner.strip("_").isupper() and method in MUTATORS
            ):
                found.append((node.lineno, f"changes the module constant {owner}"))
            case ast.Subscript(value=ast.Name(id=owner), ctx=ast.Store() | ast.Del()) if (
                owner in names and owner.strip("_").isupper()
            ):
                found.append((node.lineno, f"changes the module constant {owner}"))
            case _:
                pass
    return found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("assert x", "assert"),
        ("try:\n  x()\nexcept:\n  pass", "bare except"),
        ("def f():\n  global x\n  x = 1", "global"),
        ("eval('1')", "eval"),
        ("import torch\ntorch.load('x')", "torch.load"),
        ("yaml.load(x)", "yaml.load"),
        ("cache = {}", "cache"),
        ("seen: set[int] = set()", "seen"),
        ("_queue = collections.deque()", "_queue"),
        ("TABLE = {}\ndef f(): TABLE[1] = 2", "TABLE"),
        ("TABLE = []\ndef f(): TABLE.append(2)", "TABLE"),
    ],
)
def test_the_scan_finds_what_it_looks_for(text: str, says: str) -> None:
    """A scan that finds nothing in bad code proves nothing of good code."""
    assert says in " ".join(what for _, what in violations(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    ["TABLE = {1: 2}", "__all__ = ['x']", "def f():\n  x = []\n  x.append(1)", "re.compile('x')", "yaml.safe_load(x)"],
)
def test_the_scan_lets_good_code_pass(text: str) -> None:
    """And one that finds something everywhere would be turned off."""
    assert violations(ast.parse(text)) == []


def test_no_assert_eval_bare_except_or_mutable_global() -> None:
    """Rules 4 and 5."""
    assert [f"{name(path)}:{line}: {what}" for path in files() for line, what in violations(tree(path))] == []


def test_no_pickle() -> None:
    """Rule 4: nothing received can run code."""
    banned = ("pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing")
    assert importing(files(), *banned) == []


def foreign(module: ast.Module) -> list[tuple[int, str]]:
    """Built-in errors raised for bad data, unless the same file catches that class to turn it into one of the tree."""
    builtin = {"Exception", "ValueError", "KeyError", "AssertionError", "OSError", "IndexError", "SystemExit"}
    caught = {
        dotted(kind)
        for node in ast.walk(module)
        if isinstance(node, ast.ExceptHandler) and node.type is not None
        for kind in (node.type.elts if isinstance(node.type, ast.Tuple) else [node.type])
    }
    return [
        (node.lineno, raised)
        for node in ast.walk(module)
        if isinstance(node, ast.Raise) and node.exc is not None
        for raised in [dotted(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)]
        if raised in builtin - caught
    ]


def test_errors_are_those_of_the_tree() -> None:
    """Rule 5: what a user or a peer did wrong is told by a class of core/errors. Telemetry may not import core.

    RuntimeError and TypeError are left for our own callers' mistakes.
    """
    assert foreign(ast.parse("raise ValueError('x')")) == [(1, "ValueError")]
    assert foreign(ast.parse("try:\n  raise ValueError\nexcept (ValueError, KeyError):\n  pass")) == []
    places = [path for path in files() if PACKAGE / "telemetry" not in path.parents]
    assert [f"{name(path)}:{line} raises {what}" for path in places for line, what in foreign(tree(path))] == []


def test_files_are_small() -> None:
    """Rule 6: above 350 lines a file is named in an ADR, with the reason."""
    adrs = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "adr").glob("*.md"))
    long = {name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files()}
    assert {file: lines for file, lines in long.items() if lines > 350 and file not in adrs} == {}


def test_no_room_for_leftovers() -> None:
    """Rule 6: a file is named after what it does."""
    banned = {"util", "utils", "common", "helper", "helpers", "misc", "stuff"}
    parts = [path.relative_to(folder) for folder in (PACKAGE, ROOT / "tests") for path in folder.rglob("*.py")]
    assert [str(path) for path in parts if banned & {Path(part).stem for part in path.parts}] == []


def test_no_path_of_one_machine() -> None:
    """What is written runs elsewhere too."""
    banned = re.compile(r"\.\./shared|(?<![\w.])/(work|root|tmp/venv|home/\w+|Users/\w+)(/|\b)")
    places = [*files(), *DOCS, ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "constraints.txt"]
    places += [path for folder in ("configs", "benchmarks") for path in (ROOT / folder).rglob("*") if path.is_file()]
    wrong = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in places
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if banned.search(line)
    ]
    assert wrong == []
    for parts in (("..", "shared", "x"), ("", "root", "x")):
        assert banned.search("/".join(parts))
    assert not banned.search("/".join(("a", "work", "b")))
