"""How a process ends from outside: signals, closed outputs, a peer that does not fit. Nothing may be left of it."""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .command import ROOT, Done, Process, all_gone, is_free, left, start

pytestmark = pytest.mark.usefixtures("forks")
WITHIN_S = 60
"""An interrupted ring is gone in one to three seconds; a loaded machine takes longer."""
LONG = ("--prompt", "Once", "-n", "500", "--ignore-eos")


@pytest.fixture
def mark() -> Iterator[str]:
    """By which a command's processes are found."""
    mark = uuid.uuid4().hex
    yield mark
    assert left(mark) == []


def stopped(process: Process, mark: str) -> Done:
    """Wait until it has ended as Ctrl-C ends a command, with all that it had started."""
    began = time.monotonic()
    done = process.wait(WITHIN_S)
    assert (done.code, done.paragraph) == (130, "stopped"), done.err
    assert all_gone(mark)
    assert time.monotonic() - began < WITHIN_S
    return done


@pytest.mark.usefixtures("interpreters")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["INT", "TERM"])
def test_while_libraries_are_imported(number: signal.Signals, stories: Path, mark: str) -> None:
    with start("generate", stories, "--no-trace", *LONG, mark=mark) as process:
        process.read_until("starting")
        process.signal(number)
        stopped(process, mark)


@pytest.mark.usefixtures("interpreters")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["INT", "TERM"])
def test_while_stages_load(number: signal.Signals, stories: Path, mark: str, tmp_path: Path) -> None:
    """Its stages are importing; what they have written so far is kept."""
    folder = tmp_path / "run"
    with start("generate", stories, "--stages", "3", "--trace-dir", folder, *LONG, mark=mark) as process:
        process.read_until("waiting for 2 stages")
        assert len(left(mark)) == 3
        process.signal(number, group=number == signal.SIGINT)
        stopped(process, mark)
    assert {path.name for path in folder.glob("stage-*")} == {"stage-1.log", "stage-2.log"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["INT", "TERM"])
def test_while_text_streams(number: signal.Signals, stories: Path, mark: str) -> None:
    """A terminal sends SIGINT to the whole group; the stages are in groups of their own and end in order."""
    with start("generate", stories, "--stages", "2", "--no-trace", *LONG, mark=mark) as process:
        assert process.popen.stdout is not None and process.popen.stdout.read(1)
        process.signal(number, group=number == signal.SIGINT)
        stopped(process, mark)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["INT", "TERM"])
def test_while_nobody_joins(number: signal.Signals, stories: Path, mark: str) -> None:
    words = ("generate", stories, "--stages", "2", "--no-trace", "--listen", "127.0.0.1:0", *LONG)
    with start(*words, mark=mark) as process:
        port = int(process.read_until("can join at").rsplit(":", 1)[1])
        assert not is_free(port)
        process.signal(number, group=number == signal.SIGINT)
        stopped(process, mark)
    assert is_free(port)


def test_a_stage_that_waits_for_its_head(mark: str) -> None:
    with start("stage", "--join", "127.0.0.1:1", "--no-trace", mark=mark) as process:
        process.read_until("joining")
        process.signal(signal.SIGTERM)
        stopped(process, mark)


def shell(line: str, mark: str, stories: Path, **env: str) -> Done:
    """A shell's command line; ``generate`` in it has model and prompt."""
    ring = f"{sys.executable} -m splitlm generate {stories} --no-trace --prompt Once -n 50"
    done = subprocess.run(
        ["bash", "-c", line.replace("generate", ring)],
        capture_output=True,
        text=True,
        timeout=2 * WITHIN_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "SPLITLM_TEST_MARK": mark, **env},
    )
    assert all_gone(mark)
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("line", "code", "out", "says"),
    [
        ("generate >&-", 2, "", "stdout is closed"),
        ("generate -n 3 2>&-", 0, " upon a time\n", None),
        ("generate -n 3 <&-", 0, " upon a time\n", None),
    ],
    ids=["no stdout", "no stderr", "no stdin"],
)
def test_outputs_that_are_closed(line: str, code: int, out: str, says: str | None, stories: Path, mark: str) -> None:
    done = shell(line, mark, stories)
    assert (done.code, done.out) == (code, out), done.err
    if says:
        assert says in done.paragraph
    else:
        assert "Error" not in done.err and "Traceback" not in done.err


def test_a_reader_that_goes_ends_the_ring_as_it_ends_others(stories: Path, mark: str) -> None:
    with start("generate", stories, "--stages", "2", "--no-trace", *LONG, mark=mark) as process:
        assert process.popen.stdout is not None and process.popen.stdout.read(3) == " up"
        process.popen.stdout.close()
        assert process.popen.stderr is not None
        said = process.popen.stderr.read()
        assert process.popen.wait(WITHIN_S) == 141, said
        assert all_gone(mark)
    assert "Error" not in said and "Traceback" not in said


def test_a_result_for_which_there_is_no_room_is_told(stories: Path, mark: str) -> None:
    words = ("generate", stories, "--no-trace", "--prompt", "Once", "-n", "50", "--json")
    with Path("/dev/full").open("w") as full, start(*words, mark=mark, stdout=full) as process:
        done = process.wait(WITHIN_S)
    assert done.code == 1
    assert "stdout: The result cannot be written (No space left on device)" in done.paragraph


def test_a_terminal_that_lacks_a_character_shows_its_number(stories: Path, mark: str) -> None:
    """``plan`` writes dashes and rules; not every encoding has them."""
    done = shell(f"{sys.executable} -m splitlm plan {stories}", mark, stories, PYTHONIOENCODING="ascii")
    assert done.code == 0, done.err
    assert "blocks 0\\u20134" in done.out


def test_a_module_in_the_working_directory_is_not_taken_for_pythons(stories: Path, mark: str, tmp_path: Path) -> None:
    """The command does not look there, so the stages that it starts must not either; they find the same package."""
    (tmp_path / "queue.py").write_text("raise SystemExit('taken')")
    code = f"import sys; sys.path.append({str(ROOT / 'src')!r}); from splitlm.cli.main import main; main()"
    words = ["generate", str(stories), "--no-trace", "--prompt", "Once", "-n", "3", "--stages", "2"]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"SPLITLM_TEST_MARK": mark}
    command = [sys.executable, "-P", "-c", code, *words]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, " upon a time\n"), done.stderr
    assert all_gone(mark)


def test_a_stage_with_another_model_is_refused(stories: Path, mark: str, tmp_path: Path) -> None:
    """Same config, one weight that differs: both sides say both fingerprints, and both end."""
    from splitlm.model.index import CheckpointIndex

    other = tmp_path / "other"
    shutil.copytree(stories, other)
    index = CheckpointIndex(other)
    entry = next(iter(index.entries.values()))
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(entry.begin)
        file.write(bytes(4))
    env = {"SPLITLM_TOKEN": "secret"}
    head = ("generate", stories, "--stages", "2", "--no-trace", "--listen", "127.0.0.1:0", *LONG)
    with start(*head, mark=mark, env=env) as process:
        port = process.read_until("can join at").rsplit(":", 1)[1].strip()
        words = ("stage", other, "--join", f"127.0.0.1:{port}", "--no-trace")
        with start(*words, mark=mark, env=env) as stage, ThreadPoolExecutor(2) as pool:
            ends = list(pool.map(lambda p: p.wait(WITHIN_S), (process, stage)))
    hashes = {CheckpointIndex(folder).fingerprint() for folder in (stories, other)}
    assert len(hashes) == 2
    for done in ends:
        assert done.code == 3 and done.out == ""
        for text in hashes | {"weights fingerprint"}:
            assert text in done.paragraph


def test_the_stages_of_a_ring_need_its_token(stories: Path, mark: str) -> None:
    """The stage is told at once; the head goes on waiting, and says that somebody came."""
    head = ("generate", stories, "--stages", "2", "--no-trace", "--listen", "127.0.0.1:0", *LONG)
    with start(*head, mark=mark, env={"SPLITLM_TOKEN": "secret"}) as process:
        port = process.read_until("can join at").rsplit(":", 1)[1].strip()
        words = ("stage", stories, "--join", f"127.0.0.1:{port}", "--no-trace")
        with start(*words, env={"SPLITLM_TOKEN": "guess"}) as stage:
            done = stage.wait(WITHIN_S)
        assert done.code == 3 and "token" in done.paragraph
        assert "not admitted" in process.read_until("not admitted")
        process.signal(signal.SIGINT)
        assert process.wait(WITHIN_S).code == 130


@pytest.mark.usefixtures("interpreters")
@pytest.mark.parametrize("colour", [True, False])
def test_a_terminal_gets_a_spinner_that_leaves_lines(colour: bool, stories: Path) -> None:
    """Each thing awaited is a line in the end; NO_COLOR takes the colours, not the spinner."""
    main, side = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm-256color"}
    env |= {"PYTHONPATH": str(ROOT / "src")} | ({} if colour else {"NO_COLOR": "1"})
    process = subprocess.Popen(
        [sys.executable, "-m", "splitlm", "generate", str(stories), "--no-trace", "--prompt", "Once", "-n", "3"],
        stdout=subprocess.PIPE,
        stderr=side,
        stdin=subprocess.DEVNULL,
        env=env,
    )
    os.close(side)
    shown = b""
    try:
        while data := os.read(main, 4096):
            shown += data
    except OSError:  # the other end was closed
        pass
    finally:
        os.close(main)
    out, _ = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, out) == (0, b" upon a time\n")
    text = shown.decode()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "\n")
    assert re.search(r"[⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏] loading embedding", plain), plain
    assert "\n· ready\n" in plain and plain.count("· opening the model\n") == 1, plain
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-9]m", text)) == colour
