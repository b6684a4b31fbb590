"""Rule 8 for the file of settings of a training run: what it accepts is read by somebody, and read from it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest

from splitlm.core import config, config_sections
from splitlm.core.config_check import leaves

from .source import ROOT, files, name, tree

PLACES: Mapping[str, frozenset[str]] = {
    "ModelLimit": frozenset(),
    "Parameters": frozenset({"parameters"}),
    "Dirichlet": frozenset({"dirichlet"}),
    "DataDistribution": frozenset({"data_distribution"}),
    "Server": frozenset({"server"}),
    "Rabbit": frozenset({"rabbit"}),
    "UShape": frozenset({"u_shape"}),
    "Learning": frozenset({"learning"}),
    "LoRA": frozenset({"lora"}),
    "FineTune": frozenset({"fine_tune"}),
    "Optimizer": frozenset({"optimizer"}),
    "Security": frozenset({"security"}),
    "Privacy": frozenset({"privacy"}),
    "Settings": frozenset({"config", "settings", "mine"}),
}
"""By what the code calls a section where it reads a key of it, beside local names that are given one."""
THROUGH: Mapping[str, frozenset[str]] = {
    "Server.clients": frozenset({"owners", "workers"}),
    "Server.architecture": frozenset({"shape"}),
    "Server.model": frozenset({"n_block"}),
    "Server.bus": frozenset({"bus"}),
    "Server.aggregator": frozenset({"averages_at"}),
    "ModelLimit.n_block": frozenset({"n_block"}),
    "Rabbit.port": frozenset({"reached_at"}),
    "UShape.worker_max_inflight": frozenset({"credit"}),
    "FineTune.freeze_embeddings": frozenset({"frozen_embedding"}),
}
"""Keys that the code reads through a property of the configuration."""


def reads(module: ast.Module) -> Iterator[tuple[str, str]]:
    """(what it is read from, attribute) of each attribute that is read; local names stand for what they were given."""
    given: dict[str, str] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                for at, value in pairs:
                    if isinstance(at, ast.Name) and isinstance(value, ast.Attribute):
                        given[at.id] = value.attr
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            if isinstance(owner, ast.Attribute):
                yield owner.attr.lstrip("_"), node.attr
            elif isinstance(owner, ast.Name):
                yield given.get(owner.id, owner.id).lstrip("_"), node.attr


def sections() -> list[type[msgspec.Struct]]:
    """Every section of the file."""
    kinds = vars(config_sections).values()
    base = config_sections.Section
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, base) and kind is not base]


def test_reads_are_told_from_what_they_are_read() -> None:
    """The reader itself."""
    text = "server, x = config.server, 1\nlearn = config.learning\nserver.owners\nlearn.rate\na.b.c\nself._config.name"
    found = set(reads(ast.parse(text)))
    assert {("server", "owners"), ("learning", "rate"), ("b", "c"), ("config", "name")} <= found
    assert ("config", "rate") not in found


def test_every_section_is_looked_for() -> None:
    assert {kind.__name__ for kind in sections()} == set(PLACES)


@pytest.mark.parametrize("kind", sections(), ids=lambda kind: kind.__name__)
def test_every_key_is_read_by_some_code(kind: type[msgspec.Struct]) -> None:
    """Outside of the code that reads and checks the file itself."""
    found = {pair for path in files() if not name(path).startswith("core/config") for pair in reads(tree(path))}
    inner = {field.name for field in msgspec.structs.fields(kind) if field.name in set().union(*PLACES.values())}
    unread = []
    for field in kind.__struct_fields__:
        key = f"{kind.__name__}.{field}"
        if key in THROUGH:
            held = {attribute for _, attribute in found}
            assert all(hasattr(config.RunConfig, p) or hasattr(kind, p) for p in THROUGH[key])
            read = THROUGH[key] <= held
        else:
            read = any((place, field) in found for place in PLACES[kind.__name__])
        if not read and field not in inner:
            unread.append(field)
    assert unread == []


def test_every_key_is_in_the_table_of_the_manual() -> None:
    """And the table is the schema's: ``python -m tests.house.settings_table`` writes it."""
    from .settings_table import BEGIN, END, PAGE, drawn

    text = (ROOT / PAGE).read_text(encoding="utf-8")
    assert BEGIN in text and END in text
    assert text.partition(BEGIN)[2].partition(END)[0].strip() == drawn().strip(), "make tree draws it anew"
    missing = [path for path, _, _ in leaves(config.RunConfig()) if f"`{path.rpartition('.')[2]}`" not in text]
    assert missing == [] and "`n_block`" in text


def test_the_demos_read_what_they_set() -> None:
    from splitlm.finetune.runfile import read_run

    found: list[Path] = sorted((ROOT / "configs").glob("*.yaml"))
    assert len(found) >= 2
    for path in found:
        assert read_run(path).unused_here(local=True) == (), path
