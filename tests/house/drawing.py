"""Draws README's tree from the tree: ``python -m tests.house.drawing`` (``make tree``) writes it.

A room's line is the first of its ``__init__.py``, a file's line the first of its docstring.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from .source import PACKAGE, ROOT, tree

BEGIN, END = "<!-- tree:begin -->", "<!-- tree:end -->"
WIDTH = 150
BESIDE = {
    "benchmarks/": "one script per published figure",
    "docs/": "house rules, how a token walks, the protocol, decisions and what was tried",
    "tests/": "mirror the package; house/ holds the rules, parity/ compares with transformers",
}


def drawn() -> str:
    """The tree as a fenced block."""
    rows = [("src/splitlm/", ""), *_folder(PACKAGE, "  ")]
    rows += [(name, text) for name, text in BESIDE.items() if (ROOT / name).is_dir()]
    column = max(len(name) for name, _ in rows) + 2
    lines = [f"{name:<{column}}{text}"[:WIDTH].rstrip() for name, text in rows]
    return "\n".join(["```text", *lines, "```"])


def _folder(folder: Path, indent: str) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_file(), path.name)):
        if path.is_dir() and (path / "__init__.py").exists():
            yield f"{indent}{path.name}/", _first_line(path / "__init__.py")
            yield from _folder(path, indent + "  ")
        elif path.suffix == ".py" and path.name != "__init__.py":
            yield f"{indent}{path.name}", _first_line(path)


def _first_line(path: Path) -> str:
    text = (ast.get_docstring(tree(path)) or "").splitlines() or [""]
    return text[0].replace("``", "`").rstrip(".")


def write(page: Path) -> None:
    """Put the tree between its two marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{drawn()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    write(ROOT / "README.md")
