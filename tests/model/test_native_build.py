"""The native products are compiled once, by one process at a time; whatever goes wrong leaves a folder that works."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from splitlm.core.errors import UsageError
from splitlm.model.compute.native.build import REMEMBERED_S, VARIANTS, build, find, forget_failures, this_compiler
from splitlm.model.compute.native.library import Library, library, prepare

needs_compiler = pytest.mark.skipif(this_compiler() is None, reason="this machine has no C++ compiler")
BUILD = "import sys; from pathlib import Path; from splitlm.model.compute.native.build import build; "
BUILD += "print(build(Path(sys.argv[1]), compiler=sys.argv[2]))"


def script(path: Path, text: str) -> str:
    """A compiler that writes down that it was called, and then does what ``text`` says."""
    path.write_text(f"#!/bin/sh\necho x >> {path}.calls\n{text}\n")
    path.chmod(0o755)
    return str(path)


def calls(compiler: str) -> int:
    path = Path(f"{compiler}.calls")
    return len(path.read_text().split()) if path.exists() else 0


def start(folder: Path, compiler: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILD, str(folder), compiler]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@needs_compiler
def test_it_is_built_once_for_this_user_alone(tmp_path: Path) -> None:
    compiler = script(tmp_path / "cc", f'exec {this_compiler()} "$@"')
    folder = tmp_path / "a" / "native"
    assert find(folder) is None and not folder.exists()
    path = build(folder, compiler=compiler)
    once = calls(compiler)
    assert build(folder, compiler=compiler) == find(folder) == path and calls(compiler) == once == 1
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {p.name for p in folder.iterdir()} == {"lock", path.name}
    assert Library(path).level in {"avx512-vnni", "avx2", "neon-dotprod", "plain"}


@needs_compiler
def test_other_flags_and_another_processor_are_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build(tmp_path / "n")
    assert find(tmp_path / "n", ["-DSPLITLM_PLAIN"]) is None
    plain = build(tmp_path / "n", flags=["-DSPLITLM_PLAIN"])
    assert plain != path and Library(plain).level == "plain"
    monkeypatch.setattr("splitlm.model.compute.native.build._processor", lambda: "another")
    assert find(tmp_path / "n") is None


@needs_compiler
def test_a_library_whose_bytes_changed_is_built_anew(tmp_path: Path) -> None:
    path = build(tmp_path / "n")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert find(tmp_path / "n") is None
    assert build(tmp_path / "n") == find(tmp_path / "n")
    assert Library(build(tmp_path / "n")).level


@needs_compiler
@pytest.mark.parametrize("mode", [0o770, 0o702, 0o755])
def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    build(tmp_path / "n")
    (tmp_path / "n").chmod(mode)
    for use in (find, build):
        with pytest.raises(UsageError, match="not this user's alone"):
            use(tmp_path / "n")


@needs_compiler
def test_a_library_that_others_may_write_is_refused(tmp_path: Path) -> None:
    build(tmp_path / "n").chmod(0o775)
    with pytest.raises(UsageError, match="not this user's alone"):
        find(tmp_path / "n")


@needs_compiler
def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    compiler = script(tmp_path / "cc", f'sleep 0.5\nexec {this_compiler()} "$@"')
    processes = [start(tmp_path / "n", compiler) for _ in range(3)]
    said = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert len({out for out, _ in said}) == 1 and calls(compiler) == 1
    assert {p.suffix for p in (tmp_path / "n").iterdir()} == {"", ".so"}


@needs_compiler
def test_a_build_that_was_killed_is_done_by_the_next(tmp_path: Path) -> None:
    """Its compiler lives on and keeps the lock; the next waits for it, and takes away what both left."""
    folder = tmp_path / "n"
    slow = script(tmp_path / "slow", f'echo half > "$TMPDIR/half.o"\nsleep 1.5\ntouch {tmp_path}/over')
    process = start(folder, slow)
    until = time.monotonic() + 60
    while not (folder / "building" / "half.o").exists():
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert find(folder) is None and (folder / "building").exists()
    path = build(folder)
    assert (tmp_path / "over").exists(), "it did not wait for the compiler that was left"
    assert Library(path).level
    assert {p.name for p in folder.iterdir()} == {"lock", path.name}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("echo 'x.cpp:1:2: fatal error: cstdint: No such file' >&2\nexit 1", "fatal error: cstdint"),
        ("exit 0", "it wrote nothing"),
        ("exit 3", "it did not say why"),
    ],
)
def test_a_compiler_that_fails_is_told_in_one_paragraph(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        build(tmp_path / "n", compiler=script(tmp_path / "cc", text))
    assert "\n" not in str(caught.value) and "g++" in str(caught.value)
    assert {p.suffix for p in (tmp_path / "n").iterdir()} == {"", ".failed"}


def test_a_failure_is_remembered_until_the_compiler_is_another_or_it_is_forgotten(tmp_path: Path) -> None:
    compiler = script(tmp_path / "cc", "exit 3")
    for _ in range(3):
        with pytest.raises(UsageError, match="it did not say why"):
            build(tmp_path / "n", compiler=compiler)
    once = calls(compiler)
    assert once == len(VARIANTS)
    forget_failures(tmp_path / "n")
    with pytest.raises(UsageError, match="it did not say why"):
        build(tmp_path / "n", compiler=compiler)
    assert calls(compiler) == 2 * once
    (note,) = (tmp_path / "n").glob("*.failed")
    os.utime(note, (time.time() - REMEMBERED_S - 9,) * 2)
    with pytest.raises(UsageError, match="it did not say why"):
        build(tmp_path / "n", compiler=compiler)
    assert calls(compiler) == 3 * once
    note.write_text("torn")
    with pytest.raises(UsageError, match="it did not say why"):
        build(tmp_path / "n", compiler=compiler)
    assert calls(compiler) == 4 * once
    if this_compiler() is not None:
        assert Library(build(tmp_path / "n", compiler=script(tmp_path / "cc", f'exec {this_compiler()} "$@"'))).level


def test_processes_that_start_together_wait_for_a_broken_compiler_once(tmp_path: Path) -> None:
    compiler = script(tmp_path / "cc", "sleep 0.5\nexit 1")
    processes = [start(tmp_path / "n", compiler) for _ in range(3)]
    said = [process.communicate(timeout=120) for process in processes]
    assert all(process.returncode for process in processes) and calls(compiler) == len(VARIANTS), said


@needs_compiler
def test_a_library_that_cannot_be_loaded_here_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitlm.model.compute.native.library.folder", lambda: tmp_path / "n")
    path = build(tmp_path / "n")
    bad = b"\x7fELF of another system"
    path.rename(path.with_name(f"{path.stem.rpartition('-')[0]}-{hashlib.sha256(bad).hexdigest()[:16]}.so"))
    (bad_path,) = (tmp_path / "n").glob("*.so")
    bad_path.write_bytes(bad)
    assert find(tmp_path / "n") == bad_path
    prepare.cache_clear()
    library.cache_clear()
    try:
        assert prepare() == "" and find(tmp_path / "n") == path and library().level
    finally:
        prepare.cache_clear()
        library.cache_clear()


def test_a_compiler_that_hangs_is_ended(tmp_path: Path) -> None:
    compiler = script(tmp_path / "cc", f"echo $$ > {tmp_path}/pid\nsleep 600")
    with pytest.raises(UsageError, match="took more than 1 s"):
        build(tmp_path / "n", compiler=compiler, patience_s=1.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert calls(compiler) == 1, "it is no use to wait for it three times"


def test_a_machine_without_a_compiler_runs_the_products_of_torch(tmp_path: Path) -> None:
    """And says so: in a process of its own, since what works is found out once."""
    code = (
        "from splitlm.model.compute.choice import choose, kind_of; c = choose('int8'); "
        "print(c.name, '|', c.aside, '|', c.why, '|', kind_of('int8').name, kind_of('int8').width)"
    )
    env = {**os.environ, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    if "cannot run the engine" in done.stderr:
        pytest.skip("torch has no int8 products here either")
    assert done.returncode == 0, done.stderr
    name, aside, why, kind = (part.strip() for part in done.stdout.split("|"))
    assert (name, why, kind) == ("int8", "", "int8 (torch) 1")
    assert "there is no C++ compiler" in aside and "g++" in aside
    assert not (tmp_path / "cache" / "splitlm" / "native").exists()
