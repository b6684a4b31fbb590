"""The source tree as the house tests see it: files, rooms, imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "splitlm"
DOCS = [
    path for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))] if path.exists()
]


def files(*rooms: str) -> list[Path]:
    """Python files of the package, or of these rooms only (those that exist)."""
    if not rooms:
        return sorted(PACKAGE.rglob("*.py"))
    return [path for room in rooms for path in sorted((PACKAGE / room).rglob("*.py"))]


def name(path: Path) -> str:
    """A file's name as docs and messages give it: relative to the package, or else to the repository."""
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a file imports, wherever in the file; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                raise AssertionError(f"{name(path)}:{node.lineno}: a relative import; write the whole name")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def importing(paths: list[Path], *forbidden: str) -> list[str]:
    """``file:line imports x`` for each import of a forbidden module or of something inside it."""
    return [
        f"{name(path)}:{line} imports {module}"
        for path in paths
        for line, module in imports(path)
        if any(module == f or module.startswith(f + ".") for f in forbidden)
    ]
