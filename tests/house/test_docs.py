"""Rules 7 and 8: what is written is so."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import msgspec
import pytest

from splitlm.core import messages, sampling
from splitlm.telemetry import record

from .commands import problem, root_command, split, verbs, written
from .source import DOCS, PACKAGE, ROOT, files, importing, name, tree

CLI = PACKAGE / "cli" / "main.py"
RECORDS = (record.Step, record.StageMeta, record.Session, record.Final, record.Window, record.Migration)


def readme_tree(text: str) -> set[str]:
    """Paths in README's fenced tree: a name, two or more spaces, a comment; deeper lines lie in the folder above."""
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if not re.search(r"^\W*src/splitlm/", block, re.MULTILINE):
            continue
        found: set[str] = set()
        above: list[tuple[int, str]] = []
        for line in block.splitlines():
            bare = re.sub(r"[│├└─|]", " ", line)
            if not bare.strip():
                continue
            depth = len(bare) - len(bare.lstrip())
            path = re.split(r"\s{2,}|\s+#", bare.strip())[0]
            while above and above[-1][0] >= depth:
                above.pop()
            whole = above[-1][1] + path if above else path
            if path.endswith("/"):
                above.append((depth, whole))
            found.add(whole)
        return found
    return set()


def test_the_tree_is_read_as_it_is_drawn() -> None:
    """The reader itself, on a small tree."""
    text = "```\nsrc/splitlm/    package\n  core/       nouns\n    cut.py   cuts\n  local.py  x\ndocs/  y\n```\n"
    assert readme_tree(text) == {
        "src/splitlm/",
        "src/splitlm/core/",
        "src/splitlm/core/cut.py",
        "src/splitlm/local.py",
        "docs/",
    }
    drawn = "```text\nsrc/splitlm/\n├── core/  nouns\n│   └── cut.py  cuts\n└── local.py  x\n```\n"
    assert {"src/splitlm/core/cut.py", "src/splitlm/local.py"} <= readme_tree(drawn)


def test_the_readmes_tree_is_the_tree() -> None:
    """Rule 7: every file of the package has its line, and every line its file."""
    listed = readme_tree((ROOT / "README.md").read_text(encoding="utf-8"))
    assert listed, "README.md has no fenced block with a tree that begins at src/splitlm/"
    real = {path.relative_to(ROOT).as_posix() for path in files() if path.name != "__init__.py"}
    assert real - listed == set(), "not in README's tree"
    assert {path for path in listed if not (ROOT / path).exists()} == set(), "in README's tree only"


def test_commands_are_found_where_people_write_them(tmp_path: Path) -> None:
    """The reader itself, on each way to write a command."""
    page = tmp_path / "page.md"
    page.write_text(
        "Run `make demo`, then `splitlm plan m --stages 3`; `splitlm` alone is a name.\n"
        "```sh\n$ HF_HUB_OFFLINE=1 splitlm generate m \\\n   --prompt 'a | b' | cat  # see\n.venv/bin/splitlm demo\n"
        "python -m splitlm doctor\nother thing\nmake\n```\n"
    )
    assert list(written(page)) == [
        (1, "make", ["demo"]),
        (1, "splitlm", ["plan", "m", "--stages", "3"]),
        (3, "splitlm", ["generate", "m", "--prompt", "a | b"]),
        (5, "splitlm", ["demo"]),
        (6, "splitlm", ["doctor"]),
        (8, "make", []),
    ]
    known = {
        (): ({"--help"}, True),
        ("check",): ({"--help"}, True),
        ("check", "control"): ({"--only"}, False),
    }
    assert problem(split("check control --only kill"), known) is None
    assert problem(split("check control --only=kill model"), known) is None
    assert "no option --all" in (problem(split("check control --all"), known) or "")
    assert "no command splitlm check nothing" in (problem(split("check nothing"), known) or "")


def test_the_command_line_is_read_as_typer_builds_it() -> None:
    """The reader itself, on a small command line."""
    import typer
    from typer.main import get_command

    app, check = typer.Typer(), typer.Typer()
    app.add_typer(check, name="check")

    @app.command()
    def plan(model: str, stages: int = 1, private: bool = False) -> None:
        pass

    @check.command()
    def control(only: str = typer.Option("", "--only", "-o")) -> None:
        pass

    known = verbs(get_command(app))
    assert set(known) == {(), ("plan",), ("check",), ("check", "control")}
    assert known["plan",][0] >= {"--stages", "--private", "--no-private", "--help"}
    assert "--only" not in known["plan",][0] and not known["plan",][1]
    assert known["check", "control"][0] >= {"--only", "-o"} and known["check",][1]


def test_every_make_target_that_is_written_exists() -> None:
    """Rule 7."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w.-]+):(?!=)", makefile, re.MULTILINE))
    assert {"demo", "test", "lint", "bench", "clean"} <= targets
    used = [(name(path), line, words) for path in DOCS for line, program, words in written(path) if program == "make"]
    assert used, "no page tells how to make anything"
    for page, line, words in used:
        goals = [word for word in words if "=" not in word and not word.startswith("-")]
        assert set(goals) <= targets, f"{page}:{line}: make {shlex.join(words)}"


@pytest.mark.skipif(not CLI.exists(), reason="splitlm.cli.main is not built yet")
def test_every_command_that_is_written_parses() -> None:
    """Rule 7: the verb exists, and each option on it."""
    known = verbs(root_command())
    used = [
        (name(path), line, words) for path in DOCS for line, program, words in written(path) if program == "splitlm"
    ]
    wrong = [f"{page}:{line}: {why}" for page, line, words in used if (why := problem(words, known))]
    assert wrong == []
    assert any(page == "README.md" for page, _, _ in used), "README.md shows no command"


def documented() -> dict[str, set[str]]:
    """Fields by record, from the tables of docs/walk.md under headings ``### `tag` ``."""
    text = (ROOT / "docs" / "walk.md").read_text(encoding="utf-8")
    parts = re.split(r"^### `(\w+)`.*$", text, flags=re.MULTILINE)[1:]
    return {
        tag: set(re.findall(r"^\| `(\w+)` ", re.split(r"^#", body, flags=re.MULTILINE)[0], re.MULTILINE))
        for tag, body in zip(parts[::2], parts[1::2], strict=True)
    }


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_every_field_of_a_record_is_documented_and_every_documented_field_exists(kind: type[msgspec.Struct]) -> None:
    """Rule 8, one half: the tables in docs/walk.md are complete and no more than that."""
    assert documented()[kind.__struct_config__.tag] == set(kind.__struct_fields__)


def test_every_kind_of_record_is_documented() -> None:
    """Rule 8: and no kind is made up."""
    assert set(documented()) == {kind.__struct_config__.tag for kind in RECORDS}
    assert set(record.Record.__args__) == set(RECORDS)


@pytest.mark.skipif(not (PACKAGE / "node").exists(), reason="splitlm.node, which writes records, is not built yet")
@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_every_field_of_a_record_is_written_somewhere(kind: type[msgspec.Struct]) -> None:
    """Rule 8, the other half: a documented metric that nobody measures is a promise not kept."""
    if kind is record.Migration and not importing(files(), "splitlm.telemetry.record.Migration"):
        pytest.skip("nothing moves blocks yet")
    written_fields: set[str] = set()
    for path in files():
        if path.parent == PACKAGE / "telemetry":
            continue
        calls = {f"record.{kind.__name__}", "replace", "msgspec.structs.replace", "structs.replace"}
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and node.module == "splitlm.telemetry.record":
                calls |= {alias.asname or alias.name for alias in node.names if alias.name == kind.__name__}
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in calls:
                written_fields |= {keyword.arg for keyword in node.keywords if keyword.arg}
    assert set(kind.__struct_fields__) - written_fields == set()


@pytest.mark.skipif(not (PACKAGE / "node").exists(), reason="splitlm.node, which reads settings, is not built yet")
def test_every_setting_that_is_accepted_is_read_somewhere() -> None:
    """Rule 8: an option that changes nothing is a lie. Settings travel in Sampling and in messages."""
    read = {
        (name(path), node.attr)
        for path in files()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    } | {
        (name(path), attr)
        for path in files()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.MatchClass)
        for attr in node.kwd_attrs
    }
    kinds = [kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, messages.Message)]
    unread = [
        f"{kind.__name__}.{field}"
        for kind, home in [(sampling.Sampling, "core/sampling.py"), *((kind, "core/messages.py") for kind in kinds)]
        for field in kind.__struct_fields__
        if not any(attr == field and where != home for where, attr in read)
    ]
    assert unread == []
