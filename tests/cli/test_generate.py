"""``splitlm generate`` and ``stage --role full``: what is on stdout, and what a run leaves."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import splitlm
from splitlm.cli.moves import unmet
from splitlm.coordinator.state import Decision, Outcome
from splitlm.core.cut import diff, make_cut, shift
from splitlm.core.profile import DeviceProfile, Profiles, encode
from splitlm.core.shifts import Shift
from splitlm.model.load import ModelFiles
from splitlm.model.profile import model_profile
from splitlm.node.window import Boundary
from splitlm.telemetry.record import Session
from splitlm.telemetry.sinks import read_trace

from .command import ROOT, run

pytestmark = pytest.mark.usefixtures("forks")
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


def test_sampling_options_arrive(stories: Path) -> None:
    """One seed gives one text, another gives another; a stop string ends it and is not part of it."""
    words = ("generate", stories, "--prompt", "Once", "-n", "20", "--no-trace", "--temperature", "1.5", "--seed")
    first, again, other = (run(*words, seed).out for seed in ("1", "1", "2"))
    assert first == again != other
    stopped = run("generate", stories, "--prompt", "Once", "-n", "20", "--no-trace", "--stop", ",")
    assert stopped.out == " upon a time\n" and "ended by stop" in stopped.err


def test_a_drawn_seed_is_told_and_repeats_the_text(stories: Path, here: Path) -> None:
    """In the closing line, in JSON and in the trace; two prompts draw two. A greedy run has none."""
    words = ("generate", stories, "-n", "20", "--temperature", "1.5")
    once = run(*words, "--prompt", "Once")
    seed = re.search(r"ended by \w+; --seed (\d+)$", once.err, re.MULTILINE)
    assert seed, once.err
    again = run(*words, "--prompt", "Once", "--no-trace", "--seed", seed[1])
    assert again.out == once.out and "seed" not in again.err
    (folder,) = (here / "runs").iterdir()
    (record,) = [r for r in read_trace(folder / "trace-node0.jsonl") if isinstance(r, Session)]
    assert str(record.seed) == seed[1]
    two = run(*words, "--prompt", "Once", "--prompt", "Once", "--no-trace", "--json")
    results = [json.loads(line) for line in two.out.splitlines()]
    assert len({result["seed"] for result in results}) == 2
    repeated = run(*words, "--prompt", "Once", "--no-trace", "--json", "--seed", str(results[1]["seed"]))
    assert json.loads(repeated.out) == results[1]
    plain = run(*words, "--prompt", "a", "--prompt", "b", "--no-trace")
    assert re.search(r"· seeds \d+, \d+: each repeats its text", plain.err)
    greedy = run("generate", stories, "-n", "2", "--prompt", "Once", "--no-trace", "--json")
    assert json.loads(greedy.out)["seed"] is None


def test_a_move_that_never_came_is_warned_of(stories: Path) -> None:
    """The text ended before its boundary: the result stands, also with --quiet and --json."""
    words = ("generate", stories, "--prompt", "Once", "-n", "5", "--no-trace", "--stages", "2", "--shift-at", "40")
    for more in ("--quiet", "--json"):
        done = run(*words, more)
        warning = "1 of 1 moves did not happen: no window ended between token 40 and the end of the text"
        assert done.code == 0 and f"splitlm: warning: {warning}" in done.err.splitlines()
        assert more != "--json" or json.loads(done.out)["moves"] == [warning]
    assert "warning" not in run(*words[:-2], "-n", "45", "--shift-at", "20").err


def test_a_move_that_was_refused_is_told_with_the_reason() -> None:
    cut = make_cut(4, (2,))

    def boundary(number: int, *, reason: str = "", late: bool = False, moved: bool = False) -> Boundary:
        outcome = Outcome(
            seq=number,
            committed=not reason,
            cut=cut,
            epoch=0,
            barrier_ms=0.0,
            prestage_ms=None,
            commit_ms=None,
            n_acks=2,
            aborted=bool(reason),
            reason=reason,
            decision=Decision(),
        )
        moves = diff(cut, shift(cut, 1, 1)) if moved else ()
        return Boundary(number, 20 * number, 0.0, 0.0, outcome, moves, late=late)

    asked = [Shift(20), Shift(30)]
    assert unmet([], []) == "" == unmet([boundary(1, moved=True), boundary(2, moved=True)], asked)
    assert unmet([], asked).startswith("2 of 2 moves did not happen: no window ended between token 20")
    assert unmet([boundary(1, moved=True)], asked).startswith(
        "1 of 2 moves did not happen: no window ended between token 30"
    )
    assert "a stage had not loaded its blocks" in unmet([boundary(1, late=True)], asked)
    assert unmet([boundary(1, moved=True), boundary(2, reason="node 1 is full")], asked).endswith("node 1 is full")


def test_measured_times_choose_the_cut(stories: Path, tmp_path: Path) -> None:
    """As splitlm plan does with the same file, and with its errors."""
    files = ModelFiles(stories)
    model = model_profile(files, "m", "exact")
    devices = [
        DeviceProfile(name=name, measured=model.identity, memory_bytes=10**9, block_ms=ms)
        for name, ms in (("slow", 9.0), ("fast", 1.0))
    ]
    file = tmp_path / "p.json"
    file.write_bytes(encode(Profiles(model=model, devices=tuple(devices))))
    planned = json.loads(run("plan", stories, "--plan-from", file, "--json").out)
    words = ("generate", stories, "--prompt", "Once", "-n", "3")
    done = run(*words, "--plan-from", file, "--trace-dir", tmp_path / "t")
    assert done.code == 0 and f"cuts {planned['cuts'][0]}, by the times in {file}" in done.err
    assert "not measured, assumed to take 0.3 ms" in done.err
    config = json.loads((tmp_path / "t" / "run.json").read_text())["config"]
    assert (config["cuts"], config["stages"]) == (planned["cuts"], 2) and planned["cuts"] != [files.blocks // 2]
    both = run("generate", stories, "--prompt", "a", "--prompt", "b", "-n", "1", "--plan-from", file, "--no-trace")
    balanced = json.loads(run("plan", stories, "--plan-from", file, "--sessions", "2", "--json").out)
    assert f"cuts {balanced['cuts'][0]}, by the times" in both.err
    for more, says in (
        (("--plan-from", file, "--cuts", "2"), "one of --cuts and --plan-from"),
        (("--plan-from", file, "--stages", "3"), "3 stages and 2 devices"),
        (("--plan-from", tmp_path / "no.json"), "no.json"),
        (("--plan-from", file, "--dtype", "bfloat16"), "model.identity.dtype"),
    ):
        refused = run(*words, *more, "--no-trace")
        assert refused.code == 2 and says in refused.err


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


@pytest.mark.usefixtures("interpreters")
def test_other_libraries_say_nothing(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """transformers warns of keys that it does not use; neither the head nor its stage passes that on."""
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= {"strange": 1.0}
    (folder / "config.json").write_text(json.dumps(config))
    words = ["generate", str(folder), "--stages", "2", "--prompt", "A", "-n", "2", "--no-trace", "-q"]
    command = [sys.executable, "-m", "splitlm", *words]
    env = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_VERBOSITY"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    loud = {**env, "TRANSFORMERS_VERBOSITY": "warning"}  # the user's own word counts
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=loud)
    assert done.returncode == 0 and "strange" in done.stderr
