"""Compiles the ``.cpp`` files beside it for this processor, once, into a folder that only the user may write.

A library is named after what it was made of (source, flags, processor) and after its own bytes; only one whose name
holds for both is ever loaded. One process builds at a time: it holds a lock that its compiler inherits, so that a
compiler that outlives it keeps the next one waiting. What a killed build left is removed by the next. A failure is
written down too, so that the processes of a ring and their next starts do not each wait for the same compiler.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from splitlm.core.errors import SplitlmError, UsageError
from splitlm.model.source import cache_folder

SOURCES = tuple(Path(__file__).with_name(name) for name in ("products.cpp", "decode.cpp"))
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # a row's sums are rounded alike, however many rows are computed together
    "-pipe",
)
VARIANTS = (("-march=native", "-fopenmp"), ("-march=native",), ())
"""Further flags, the best first: some compilers come without OpenMP (one thread, then), some do not know ``native``."""
COMPILER_S = 45.0
"""Patience with a compiler, and with another process that builds; the compiler takes a second or some."""
REMEMBERED_S = 24 * 3600.0
"""For so long a build that failed is not tried again, unless the compiler is another one."""
_PRIVATE = 0o700
_LOCK, _SCRATCH, _FAILED = "lock", "building", ".failed"


def folder() -> Path:
    """Where libraries are kept.

    Raises:
        UsageError: the user has no such place.
    """
    try:
        return cache_folder().parent / "native"
    except SplitlmError as error:
        raise UsageError(str(error).rstrip("."), where="the native products") from error


def this_compiler() -> str | None:
    """The C++ compiler of this machine."""
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def find(where: Path, flags: Sequence[str] = ()) -> Path | None:
    """The library of this source and this processor, if it was built; nothing is compiled.

    Args:
        where: the folder of libraries.
        flags: see ``build``.

    Raises:
        UsageError: the folder or the library is not only the user's own.
    """
    try:
        if not where.is_dir():
            return None
        _check_owner(where, 0o077)
        name = _name(flags)
        for path in sorted(where.glob(f"{name}-*.so")):
            _check_owner(path, 0o022)
            if path.stem == f"{name}-{_digest(path.read_bytes())}":
                return path
    except OSError as error:
        raise _unusable(where, error) from error
    return None


def build(
    where: Path, *, compiler: str | None = None, flags: Sequence[str] = (), patience_s: float = COMPILER_S
) -> Path:
    """The library of this source and this processor, compiled if it is not there yet. Many may do it at once.

    Args:
        where: the folder of libraries; made if it is missing.
        compiler: the program that compiles; None for this machine's.
        flags: given to it as well.
        patience_s: with the compiler, and with another process that builds.

    Raises:
        UsageError: there is no compiler, it failed or took too long, or the folder cannot be used.
    """
    found = find(where, flags)
    if found is not None:
        return found
    if sys.platform == "win32":
        raise _failed("this system has no file locks that a compiler could inherit", "Use Linux or macOS for it")
    program = compiler or this_compiler()
    if program is None:
        raise _failed("there is no C++ compiler", "Install g++ (Debian: apt install g++)")
    try:
        where.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        _check_owner(where, 0o077)
        failure = where / f"{_name(flags)}-{_digest(_compiler(program).encode())}{_FAILED}"
        _check_failure(failure)
        with _locked(where / _LOCK, patience_s) as lock:
            _check_failure(failure)
            try:
                return find(where, flags) or _compiled(where, program, flags, lock, patience_s)
            except UsageError as error:
                failure.write_text(json.dumps([error.what, error.remedy]), encoding="utf-8")
                raise
    except OSError as error:
        raise _unusable(where, error) from error


def forget_failures(where: Path) -> None:
    """A build that failed is to be tried again."""
    with contextlib.suppress(OSError):
        for path in where.glob(f"*{_FAILED}"):
            path.unlink(missing_ok=True)


def _compiler(program: str) -> str:
    """What tells a compiler from another one, and from itself once it is mended."""
    found = shutil.which(program) or program
    state = Path(found).stat()
    return f"{found} {state.st_mtime_ns} {state.st_size}"


def _check_failure(path: Path) -> None:
    """Whether the same build failed not long ago.

    Raises:
        UsageError: it did; says what was said then.
    """
    try:
        if not -60 < time.time() - path.stat().st_mtime < REMEMBERED_S:
            return
        what, remedy = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    raise _failed(str(what), str(remedy))


def _compiled(where: Path, program: str, flags: Sequence[str], lock: int, patience_s: float) -> Path:
    scratch = where / _SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)  # of a build that was killed
    scratch.mkdir(mode=_PRIVATE)
    made = scratch / "products.so"
    try:
        said, until = "", time.monotonic() + patience_s
        for variant in VARIANTS:
            command = [program, *FLAGS, *variant, *flags, *map(str, SOURCES), "-o", str(made)]
            wrong = _run(command, scratch, lock, patience_s, until)
            if not wrong and made.is_file():
                content = made.read_bytes()
                path = where / f"{_name(flags)}-{_digest(content)}.so"
                with made.open("rb") as file:
                    os.fsync(file.fileno())
                made.replace(path)
                return path
            said = said or wrong or "it wrote nothing"
        raise _failed(f"{program} failed: {said}", "Install or mend g++ (Debian: apt install g++)")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(command: Sequence[str], scratch: Path, lock: int, patience_s: float, until: float) -> str:
    """What was wrong; "" where nothing was.

    Args:
        patience_s: of which what is left ends at ``until``.

    Raises:
        UsageError: it took too long.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch), "LC_ALL": "C"},
            pass_fds=(lock,),
            start_new_session=True,  # so that all of it can be ended
        )
    except OSError as error:
        return f"it cannot be started ({error.strerror})"
    with process:
        try:
            out, _ = process.communicate(timeout=max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise _failed(f"{command[0]} took more than {patience_s:g} s", "Try it on a machine less busy") from error
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode == 0:
        return ""
    lines = [line for line in out.decode(errors="replace").splitlines() if "error" in line] or ["it did not say why"]
    return " ".join(lines[0].split())[:200]


@contextlib.contextmanager
def _locked(path: Path, patience_s: float) -> Iterator[int]:
    """Holds a file's lock, as do processes that inherit its descriptor, which comes back.

    Raises:
        UsageError: someone else holds it all the time.
    """
    import fcntl  # not everywhere

    until = time.monotonic() + patience_s
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > until:
                    raise _failed(
                        f"another process has been building it for {patience_s:g} s ({path} is locked)",
                        "Find and end that process",
                    ) from error
                time.sleep(0.05)
        yield lock
    finally:
        os.close(lock)


def _check_owner(path: Path, others: int) -> None:
    """What others may change is not loaded.

    Args:
        others: permissions that group and others must not have.

    Raises:
        UsageError: they have, or it is someone else's.
    """
    found = path.lstat()
    if found.st_uid != os.getuid() or found.st_mode & others:
        raise _failed(f"{path} is not this user's alone", f"Remove it (or: chmod go= {path})")


def _name(flags: Sequence[str]) -> str:
    made_of = [
        *(source.read_text(encoding="utf-8") for source in SOURCES),
        repr((FLAGS, VARIANTS, tuple(flags))),
        _processor(),
    ]
    return f"products-{_digest(chr(0).join(made_of).encode())}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _processor() -> str:
    """What ``-march=native`` depends on; where that is not told, the machine's name, since homes are shared."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    keys = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    told = sorted({line for line in lines if line.partition(":")[0].strip() in keys})
    return "\n".join([platform.machine(), *platform.libc_ver(), *(told or [platform.processor(), platform.node()])])


def _unusable(where: Path, error: OSError) -> UsageError:
    return _failed(f"{where} cannot be used ({error})", "Make room there, or set XDG_CACHE_HOME")


def _failed(what: str, remedy: str) -> UsageError:
    return UsageError(what, where="the native products", remedy=remedy)
