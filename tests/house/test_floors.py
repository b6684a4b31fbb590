"""Rules 1 to 3: arrows run down, planes do not mix, who decides imports no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib

import pytest

from .source import PACKAGE, ROOT, files, importing, imports, name, tree

TORCH = ("torch", "transformers", "peft", "safetensors", "tokenizers", "numpy")
DECIDERS = ("core", "telemetry", "wire", "plan", "coordinator", "serve", "bus")


def test_arrows_run_down_only() -> None:
    """Rule 1: a file imports from lower floors only; rooms on one floor do not import each other."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from importlinter.cli import lint_imports_command as c; c()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "KEPT" in done.stdout and "0 broken" in done.stdout, done.stdout


def test_every_room_has_its_floor_in_the_contract() -> None:
    """Rule 1: a new room is put on a floor before it is built; the contract itself is exhaustive."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    floors = next(c for c in contracts if c["id"] == "floors")
    assert floors["exhaustive"] is True
    named = {room.strip("() ") for layer in floors["layers"] for room in layer.split("|")}
    rooms = {path.stem for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"} - {"__pycache__"}
    assert rooms - {"__init__", "__main__", "py"} <= named


def test_the_lowest_floor_needs_the_standard_library_and_msgspec_only() -> None:
    """Rule 1: core and telemetry are nouns; they lean on nothing."""
    allowed = {*sys.stdlib_module_names, "msgspec"}
    wrong = [
        f"{name(path)}:{line} imports {module}"
        for room in ("core", "telemetry")
        for path in files(room)
        for line, module in imports(path)
        if module.split(".")[0] not in allowed and not module.startswith((f"splitlm.{room}.", "splitlm.__version__"))
    ]
    assert wrong == []
    assert importing(files("core"), "socket", "asyncio", "pathlib", "subprocess", "threading", "os", "io") == []


def test_frames_are_bytes_and_know_no_socket() -> None:
    """Rule 1: wire turns bytes into frames and back; link moves them."""
    assert importing(files("wire"), "socket", "asyncio", "select", "selectors") == []
    assert importing([path for path in files("wire") if path.stem != "tls"], "ssl") == []


def test_transformers_has_one_home() -> None:
    """Rule 1: model/ is the only home of transformers and peft."""
    others = [path for path in files() if PACKAGE / "model" not in path.parents]
    assert importing(others, "transformers", "peft") == []


def test_a_link_carries_no_decision() -> None:
    """Rule 2: links know frames, not messages nor plans; a message has no field that could hold a tensor."""
    assert importing(files("link"), "splitlm.core.messages", "splitlm.planner") == []
    from splitlm.core import messages

    kinds = [kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, messages.Message)]
    assert len(kinds) > 3
    for kind in kinds:
        for field, annotation in kind.__annotations__.items():
            assert not {"bytes", "bytearray", "memoryview", "Tensor"} & set(
                annotation.replace("[", " ").replace("]", " ").replace("|", " ").split()
            ), f"{kind.__name__}.{field}"


def test_the_bus_carries_no_tensor() -> None:
    """Rule 2: of all frames the bus knows only the one that holds a message, and the handshake's."""
    kinds = {"Hidden", "Token", "Open", "Close", "Gradient"}
    wrong = [
        f"{name(path)}:{line} imports {module}"
        for path in files("bus")
        for line, module in imports(path)
        if module.rsplit(".", 1)[-1] in kinds or module.startswith("splitlm.model")
    ]
    assert wrong == []


def test_who_decides_imports_no_torch() -> None:
    """Rule 3: not even by way of another module, nor late, inside a function."""
    import grimp

    graph = grimp.build_graph("splitlm", include_external_packages=True, cache_dir=None)
    for face in graph.find_modules_directly_imported_by("splitlm"):
        graph.remove_import(importer="splitlm", imported=face)  # lazy: see test_importing_the_package
    known = graph.modules
    chains = [
        " -> ".join(chain)
        for room in DECIDERS
        if f"splitlm.{room}" in known
        for heavy in TORCH
        if heavy in known
        for chain in graph.find_shortest_chains(f"splitlm.{room}", heavy)
    ]
    assert chains == []


def test_the_torch_contract_names_every_decider_that_exists() -> None:
    """Rule 3: ``make lint`` says the same as this file."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    named = set(next(c for c in contracts if c["id"] == "torch")["source_modules"])
    built = {f"splitlm.{room}" for room in ("core", "telemetry", "wire", "plan", "coordinator", "serve")}
    assert {module for module in built if (PACKAGE / module.split(".")[1]).is_dir()} <= named


def test_the_model_opens_no_socket() -> None:
    """Rule 3: a Stage computes; it knows no peer."""
    assert importing(files("model"), "socket", "selectors", "ssl", "http", "urllib", "requests", "httpx") == []
    openers = {"open_connection", "start_server", "create_connection", "create_server", "sock_connect"}
    wrong = [
        f"{name(path)}:{node.lineno} {node.attr}"
        for path in files("model")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr in openers
    ]
    assert wrong == []


@pytest.mark.skipif(not (PACKAGE / "cli" / "main.py").exists(), reason="splitlm.cli.main is not built yet")
def test_help_of_every_verb_leaves_torch_alone() -> None:
    """Rule 3: ``--help`` is quick, so it loads no torch; asked of every verb and every group's sub-verbs."""
    script = """
import contextlib, io, sys
from tests.house.commands import root_command, walk
root = root_command()
for words, _ in list(walk(root)):
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        try:
            root.main([*words, "--help"], prog_name="splitlm")
        except SystemExit as end:
            if end.code:
                sys.exit(f"splitlm {' '.join(words)} --help exits {end.code}")
    if "Usage" not in text.getvalue():
        sys.exit(f"splitlm {' '.join(words)} --help prints no usage")
    if heavy := {"torch", "transformers"} & sys.modules.keys():
        sys.exit(f"splitlm {' '.join(words)} --help imports {heavy}")
    print("helped", *words)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("helped") >= 2, done.stdout


@pytest.mark.skipif(not (PACKAGE / "cli" / "main.py").exists(), reason="splitlm.cli.main is not built yet")
def test_importing_the_package_imports_nothing_heavy() -> None:
    """Rule 3: ``import splitlm`` exports lazily."""
    code = "import sys, splitlm; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = done.stdout.split()
    assert [m for m in loaded if m in {"torch", "transformers", "asyncio", "typer"} or m.startswith("splitlm.")] == []


def test_the_scan_sees_the_source() -> None:
    """The other tests here would pass on an empty tree."""
    assert {"core/cut.py", "telemetry/record.py"} <= {name(path) for path in files()}
    assert all(tree(path).body for path in files("core"))
    assert importing(files("core"), "msgspec") != []
