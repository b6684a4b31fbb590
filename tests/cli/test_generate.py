"""``splitlm generate`` and ``stage --role full``: what is on stdout, and what a run leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import splitlm

from .command import ROOT, run

BEGIN = " upon a time, there was a little girl"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory of our own."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def test_one_prompt_is_streamed_as_it_is(stories: Path) -> None:
    """The text and one line end; nothing else on stdout."""
    done = run("generate", stories, "--prompt", "Once", "-n", "10", "--no-trace")
    assert (done.code, done.out) == (0, BEGIN[: len(done.out) - 1] + "\n")
    assert len(done.out) > 20 and "· 10 tokens, ended by length" in done.err
    from_stdin = [
        run("generate", stories, "-n", "10", "--no-trace", *more, stdin=text)
        for more in ((), ("--prompt", "-"))
        for text in ("Once", "Once\n")
    ]
    assert {other.out for other in from_stdin} == {done.out}
    full = run("stage", stories, "--role", "full", "--prompt", "Once", "--max-new-tokens", "10", "--no-trace")
    assert full.out == done.out


def test_two_processes_say_what_one_says_and_leave_a_run(stories: Path, here: Path) -> None:
    """Several prompts as JSON; the trace of both nodes, the settings without the secret, the stage's log."""
    prompts = ("--prompt", "Once", "--prompt", "The dog")
    alone = run("generate", stories, *prompts, "-n", "5", "--json", "--no-trace")
    both = run("generate", stories, *prompts, "-n", "5", "--json", "--stages", "2", "--run-label", "two words")
    assert alone.out == both.out and both.code == 0
    first, second = map(json.loads, both.out.splitlines())
    assert (first["prompt"], second["prompt"], first["finish"]) == ("Once", "The dog", "length")
    assert len(first["tokens"]) == 5 and BEGIN.startswith(first["text"]) and first["prompt_tokens"] > 0
    (folder,) = (here / "runs").iterdir()
    assert folder.name.endswith("-generate-two-words") and f"trace in runs/{folder.name}" in both.err
    names = {path.name for path in folder.iterdir()}
    assert names == {"run.json", "stage-1.log", "trace-node0.jsonl", "trace-node1.jsonl"}
    settings = json.loads((folder / "run.json").read_text())
    assert settings["verb"] == "generate" and settings["config"]["stages"] == 2 and "token" not in settings["config"]
    assert settings["config"]["max_new_tokens"] == 5 and settings["config"]["sampling"]["temperature"] == 0


def test_a_folder_that_is_used_again_holds_the_newest_run_alone(stories: Path, here: Path) -> None:
    """Two stages leave two traces; one stage, in the same folder, must not leave the other's beside its own."""
    words = ("generate", stories, "--prompt", "Once", "-n", "3", "--trace-dir", here / "t")
    assert run(*words, "--stages", "2").code == 0
    (here / "t" / "notes.txt").write_text("mine")
    assert {p.name for p in (here / "t").iterdir()} >= {"trace-node1.jsonl", "stage-1.log"}
    assert run(*words).code == 0
    assert {p.name for p in (here / "t").iterdir()} == {"notes.txt", "run.json", "trace-node0.jsonl"}


def test_a_stage_that_joins_clears_its_own_folder(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    """It may have had another place before; one that the head started shares the head's folder and clears nothing."""
    from splitlm.node import join

    async def nothing(_: object) -> None:
        return

    monkeypatch.setattr(join, "run_stage", nothing)
    old = here / "t" / "trace-node2.jsonl"
    old.parent.mkdir()
    for parent, stays in (("7", True), ("0", False)):
        old.write_text("")
        assert run("stage", "--join", "localhost:1", "--trace-dir", here / "t", "--parent", parent).code == 0
        assert old.exists() == stays


def test_sampling_options_arrive(stories: Path) -> None:
    """One seed gives one text, another gives another; a stop string ends it and is not part of it."""
    words = ("generate", stories, "--prompt", "Once", "-n", "20", "--no-trace", "--temperature", "1.5", "--seed")
    first, again, other = (run(*words, seed).out for seed in ("1", "1", "2"))
    assert first == again != other
    stopped = run("generate", stories, "--prompt", "Once", "-n", "20", "--no-trace", "--stop", ",")
    assert stopped.out == " upon a time\n" and "ended by stop" in stopped.err


def test_other_machines_choose_their_own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages on this machine share its cores; one that joins may have fewer, and takes the word given."""
    from splitlm.cli import options, stage

    monkeypatch.setattr(options, "cores", lambda: 8)
    given = options.RingOptions(stages=4)
    assert given.settings()["threads"] == 2
    assert given.settings(listen=("127.0.0.1", 1))["threads"] == 0
    assert options.RingOptions(threads=3).settings(listen=("127.0.0.1", 1))["threads"] == 3
    first: list[dict[str, object]] = []
    monkeypatch.setattr(stage, "_be_first", lambda *arguments: first.append(arguments[4]))
    fixed = ("--layer-begin", "-1", "--layer-end", "2", "--recv", "a:1", "--send", "b:2", "--ctrl", "c:3")
    assert run("stage", "model", *fixed, "--prompt", "x").code == 0
    assert run("stage", "model", "--role", "full", "--prompt", "x").code == 0
    assert [settings["threads"] for settings in first] == [0, 8]
    assert (first[0]["listen"], first[0]["data"], first[0]["send"]) == (("c", 3), ("a", 1), ("b", 2))


def test_the_module_is_the_command() -> None:
    """From a source tree, without what pip would have written down."""
    command = [sys.executable, "-I", "-c"]
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); sys.argv = ['splitlm', '--version']; "
    code += "import runpy; runpy.run_module('splitlm', run_name='__main__')"
    done = subprocess.run([*command, code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"splitlm {splitlm.__version__}\n"
