"""Processes of ours that start in a twentieth of a second: forked from one that has imported what all of them need.

Most of what a ring of processes costs a test is the import of torch and transformers, again in each process. A module
of tests that asks for the fixture ``forks`` gets real processes all the same (a pid, a death by signal, sockets and
memory of their own, children of whoever started them), but each begins where the imports end. What is started is what
``subprocess.Popen`` was told: ``python -m splitlm …`` or ``python -c …``. Any other command, and one whose environment
changes what is read only once, at import, starts as it always did, and so does everything with
``SPLITLM_TEST_SPAWN=1``. A test of the start itself does not ask for the fixture.

How: the mother is a process with one thread that has computed nothing yet. Told a command, she forks a child that
forks the process and ends, whereupon the kernel gives the orphan to the nearest ancestor that adopts orphans: the one
that asked, which adopts them for that moment. A process that may start others forks a mother of its own before it
begins; she ends with it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
NAME = "test-forks"
"""What the kernel calls a mother: no child that a test looks for."""
IMPORTED = (
    *("torch", "transformers", "peft", "splitlm.cli.main", "splitlm.cli.stage", "splitlm.cli.generate"),
    *("splitlm.local", "splitlm.localtrain", "splitlm.training", "splitlm.node.join", "splitlm.node.ring"),
    *("splitlm.model.tunable", "transformers.models.llama.modeling_llama", "transformers.models.bert.modeling_bert"),
)
AT_IMPORT = ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "CUDA_VISIBLE", "PYTHONIO", "LC_", "LANG")
"""Beginnings of variables that Python or a library reads once."""
SPAWN = os.environ.get("SPLITLM_TEST_SPAWN", "") == "1"
MOST_BYTES = 1 << 18
LEAVES = frozenset({"stage", "client"})
"""Verbs that start no process."""
NETWORK = ("ip", "netns", "exec")
"""Before the name of a network namespace and a command that runs in it."""
CLONE_NEWNET = 0x40000000
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36


REAL = subprocess.Popen
"""As it is where nobody asked for forks."""


def _kernel(call: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), call)(*arguments):
        raise OSError(ctypes.get_errno(), f"{call} {arguments}")


def prctl(option: int, value: object) -> None:
    _kernel("prctl", option, value, 0, 0, 0)


def is_mother(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == NAME
    return False


def told(pid: int) -> dict[str, Any]:
    """What a forked process was told (``argv``, ``env``); ``/proc`` shows what its mother was. Empty for any other."""
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(link.readlink()).startswith(f"/memfd:{NAME}"):
                    found: dict[str, Any] = json.loads(link.read_bytes())
                    return found
    return {}


def command_line(pid: int) -> list[str]:
    """The words by which a process was started."""
    if words := told(pid).get("argv"):
        return list(words)
    with contextlib.suppress(OSError):
        return [word.decode() for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
    return []


class Mother:
    """Who asks her: one end of a socket to her, and which environment she was born into."""

    def __init__(self, sock: socket.socket, environment: Mapping[str, str]) -> None:
        self.sock, self._born, self._lock = sock, _read_once(environment), threading.Lock()

    def can(self, words: Sequence[str], env: Mapping[str, str]) -> bool:
        """Whether the process would be the same one."""
        python, kind, what, *_ = [*words, "", "", ""]
        ours = python == sys.executable and (kind == "-c" or (kind == "-m" and what.split(".")[0] == "splitlm"))
        return ours and _read_once(env) == self._born

    def bear(self, wish: Mapping[str, Any], streams: Sequence[int]) -> int:
        """Start it; its pid. It is a child of this process, to be waited for like any."""
        with self._lock:
            prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self.sock, [json.dumps(wish).encode()], streams)
                pid = int(self.sock.recv(64) or b"0")
            finally:
                prctl(PR_SET_CHILD_SUBREAPER, 0)
        if not pid:
            raise OSError("the process that others are forked from is gone")
        return pid


def _read_once(environment: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if key.startswith(AT_IMPORT)}


def popen(mother: Mother) -> type[subprocess.Popen[Any]]:
    """``subprocess.Popen``, with her children where that shows the same."""

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def _execute_child(  # type: ignore[no-untyped-def]
            self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
            start_new_session, process_group,
        ) -> None:  # fmt: skip
            environment = dict(os.environ if env is None else env)
            usual = executable is None and not (shell or preexec_fn or pass_fds) and isinstance(args, list | tuple)
            words = [os.fspath(word) for word in args] if usual else []
            network = words[3] if tuple(words[:3]) == NETWORK else ""
            words = words[4:] if network else words
            if not usual or not mother.can(words, environment):
                super()._execute_child(  # type: ignore[misc]
                    args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                    p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
                    start_new_session, process_group,
                )  # fmt: skip
                return
            streams = [own if fd == -1 else fd for own, fd in enumerate((p2cread, c2pwrite, errwrite))]
            where = os.fspath(cwd) if cwd is not None else str(Path.cwd())
            wish = {"argv": words, "env": environment, "cwd": where, "session": start_new_session, "network": network}
            self.pid = mother.bear(wish, streams)
            self._child_created = True
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    return Popen


@contextlib.contextmanager
def mother(**changes: str) -> Iterator[Mother]:
    """A process to fork others from; it ends with the block, or with this process.

    Args:
        changes: of the environment, where what libraries read at import is to be another than ours.
    """
    ours, hers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        words = [sys.executable, "-m", "tests.forks", str(hers.fileno())]
        paths = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))))
        env = {**os.environ, **changes, "PYTHONPATH": paths}
        process = subprocess.Popen(words, cwd=ROOT, env=env, pass_fds=[hers.fileno()], stdin=subprocess.DEVNULL)
        hers.close()
        try:
            yield Mother(ours, env)
        finally:
            ours.close()
            process.wait(60)


def serve(sock: socket.socket) -> dict[str, Any] | None:
    """Fork what is asked for, until nobody can ask: None. In a forked process: what it was told to be."""
    prctl(PR_SET_NAME, NAME.encode())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        data, streams, _, _ = socket.recv_fds(sock, MOST_BYTES, 3)
        if not data:
            return None
        go_read, go_write = os.pipe()
        said_read, said_write = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            mark = os.memfd_create(NAME)
            os.write(mark, data)
            os.write(said_write, str(os.getpid()).encode())
            for fd in (said_read, said_write, go_write):
                os.close(fd)
            os.read(go_read, 1)  # until it has its parent
            os.close(go_read)
            sock.close()
            wish: dict[str, Any] = json.loads(data)
            _become(wish, streams, mark)
            return wish
        os.waitpid(between, 0)
        sock.send(os.read(said_read, 64))
        for fd in (go_read, go_write, said_read, said_write, *streams):
            os.close(fd)


def _become(wish: Mapping[str, Any], streams: Sequence[int], mark: int) -> None:
    """Session, directory, environment, streams and signals of a process that has just been started."""
    prctl(PR_SET_NAME, b"python")
    if wish["session"]:
        os.setsid()
    if wish["network"]:
        with Path("/var/run/netns", wish["network"]).open() as namespace:
            _kernel("setns", namespace.fileno(), CLONE_NEWNET)
    os.chdir(wish["cwd"])
    os.environ.clear()
    os.environ.update(wish["env"])
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "r", closefd=False)), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8", line_buffering=os.isatty(1)
    )
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(2, "w", closefd=False)), "utf-8", "backslashreplace", line_buffering=True
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if wish["argv"][2] != "splitlm" or not LEAVES & set(wish["argv"][3:4]):
        _own_mother(mark)


def _own_mother(mark: int) -> None:
    """Another mother, with this process alone to ask her."""
    ours, hers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        os.close(mark)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        if (wish := serve(hers)) is None:
            os._exit(0)
        _run(wish)
    hers.close()
    subprocess.Popen = popen(Mother(ours, os.environ))  # type: ignore[misc]


def _run(wish: Mapping[str, Any]) -> NoReturn:
    """Be it, to its end: as the interpreter ends, but for taking every module apart, which takes a second."""
    code: object = 0
    _, kind, what, *more = wish["argv"]
    sys.argv = [kind, *more]
    try:
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102 - as ``python -c`` does
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - Python, too, shows what nobody caught and ends with 1
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    if len(list(Path("/proc/self/task").iterdir())) != 1:
        raise RuntimeError("an import started a thread, which a forked process would lack")
    gc.collect()
    gc.freeze()  # what all share is not gone through, and so not copied, by each
    if (wish := serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        _run(wish)


if __name__ == "__main__":
    main()
