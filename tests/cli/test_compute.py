"""``--compute``: what a user can do wrong with it, and what is said where another engine runs than was asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from splitlm.core.errors import UsageError
from splitlm.model.compute.choice import Choice, choose, need
from tests.cli.command import run
from tests.model.made import edit_tensors
from tests.tiny import build


@pytest.mark.parametrize("verb", [("generate", "--prompt", "A"), ("check", "equivalence")])
@pytest.mark.parametrize(
    ("compute", "stages", "says"),
    [
        ("float7", "2", "one of exact, fast, int8, int4"),
        ("fast,nothing", "2", "'nothing' is not allowed"),
        ("fast,", "2", "'' is not allowed"),
        ("fast,exact", "3", "2 engines are named. Expected one, or one for each of 3 stages"),
        ("fast,exact,exact", "2", "3 engines are named. Expected one, or one for each of 2 stages"),
    ],
)
def test_engines_that_cannot_be_are_usage_errors(
    verb: tuple[str, ...], compute: str, stages: str, says: str, tiny: Callable[[str], Path]
) -> None:
    name, *words = verb
    place = (name, *words[:1]) if name == "check" else (name,)
    more = () if name == "check" else tuple(words)
    done = run(*place, tiny("llama"), *more, "--compute", compute, "--stages", stages, "--no-trace")
    assert done.code == 2 and done.paragraph.startswith("--compute: ") and says in done.paragraph
    assert done.out == ""


@pytest.mark.skipif(choose("fast").name != "fast", reason="this machine has no float16 products")
@pytest.mark.parametrize("compute", ["fast", "int4"])
def test_a_matrix_that_cannot_be_packed_is_told_and_nothing_else_happens(compute: str, tmp_path: Path) -> None:
    """Beyond float16's range; of a shape that int4 has no kernel for."""
    folder = build("llama", tmp_path)

    def change(tensors: dict[str, object]) -> dict[str, object]:
        weight = tensors["model.layers.1.mlp.down_proj.weight"]
        weight[3, 4] = 131008  # type: ignore[index]
        return tensors

    edit_tensors(folder, change)
    words = ("generate", folder, "--prompt", "A fox", "-n", "3", "--stages", "1", "--no-trace", "--ignore-eos")
    done = run(*words, "--compute", compute)
    assert done.code == 0, done.err
    said = [line for line in done.err.splitlines() if "stays in float32" in line]
    assert [("131008" in line) for line in said] == ([True] if compute == "fast" else [])


def test_fast_gives_way_and_the_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from splitlm.model.compute import choice

    assert choose("exact") == need("exact") == Choice("exact")
    with pytest.raises(UsageError, match="no engine 'float7'"):
        choose("float7")
    monkeypatch.setattr(choice, "choose", lambda asked: Choice("exact", "no such products"))
    with pytest.raises(UsageError, match=r"cannot run the engine 'fast' \(no such products\)"):
        need("fast")
    assert need("exact").name == "exact"
    monkeypatch.setattr(choice, "choose", lambda asked: Choice("int8", aside="no compiler"))
    assert need("int8").aside == "no compiler"
