"""The command line as data: every verb, and the options it takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def root_command() -> Any:
    """The command line's root; imports no more than ``--help`` does."""
    from typer.main import get_command

    from splitlm.cli.main import app

    return get_command(app)


def walk(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Words after ``splitlm`` and the command they name: the root, every verb, and every sub-verb of a group."""
    yield words, command
    for verb, below in getattr(command, "commands", {}).items():
        yield from walk(below, (*words, verb))


def verbs(root: Any) -> dict[tuple[str, ...], tuple[set[str], bool]]:
    """Words → (options it takes, whether it is a group of sub-verbs)."""
    return {
        words: (
            {option for p in command.params for option in (*p.opts, *p.secondary_opts) if option.startswith("-")}
            | {"--help"},
            bool(getattr(command, "commands", {})),
        )
        for words, command in walk(root)
    }


def problem(words: list[str], known: dict[tuple[str, ...], tuple[set[str], bool]]) -> str | None:
    """What is wrong with a ``splitlm`` command, given as its words after ``splitlm``; None when it parses."""
    at: tuple[str, ...] = ()
    allowed = set(known[()][0])
    for word in words:
        if word.startswith("-") and not re.fullmatch(r"-\d+", word):
            option = word.split("=", 1)[0]
            if option not in allowed:
                return f"{' '.join(('splitlm', *at))} has no option {option}"
        elif known[at][1]:
            if (*at, word) not in known:
                return f"there is no command {' '.join(('splitlm', *at, word))}"
            at = (*at, word)
            allowed = known[at][0]
    return None


def written(path: Path) -> Iterator[tuple[int, str, list[str]]]:
    """(line, program, words) of each ``splitlm`` or ``make`` command in a Markdown file.

    In fenced blocks: lines that begin with the program, after ``$`` and ``NAME=value``; a final backslash goes on in
    the next line. In the text: `code` that begins with the program and has at least one word after it.
    """
    fenced, begun, at = False, "", 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.lstrip().startswith("```"):
            fenced, begun = not fenced, ""
            continue
        if not fenced:
            for code in re.findall(r"`([^`]+)`", line):
                if found := re.match(r"(splitlm|make) (.+)", code):
                    yield number, found[1], split(found[2])
            continue
        at = at if begun else number
        begun += line.strip()
        if begun.endswith("\\"):
            begun = begun[:-1] + " "
            continue
        text, begun = re.sub(r"^(\$ )?(\w+=\S+ )*((\S*/)?python\d? -m )?", "", begun), ""
        if found := re.match(r"(?:\S*/)?(splitlm|make)(?: (.+))?$", text):
            yield at, found[1], split(found[2] or "")


def split(text: str) -> list[str]:
    """Words of one shell command, up to a pipe, a redirection, a comment or the next command."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>()")
    lexer.whitespace_split = True
    words = []
    for word in lexer:
        if set(word) <= set("|&;<>()"):
            break
        words.append(word)
    return words
