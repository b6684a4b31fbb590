"""One side of a comparison: a child process that is told by lines when its turn is, and answers with JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from types import TracebackType
from typing import Any

from splitlm.core.errors import SplitlmError, from_exit_code
from splitlm.node.package import own_package

END_S = 30.0
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Arm:
    """A ``python -m splitlm.bench.worker`` child with one intra-op thread and passive OpenMP waits.

    Args:
        kind: what it is to be; see ``worker.KINDS``.
        settings: for that kind, as JSON.
    """

    def __init__(self, kind: str, **settings: Any) -> None:
        self.kind = kind
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        environment = {**os.environ, **own_package(), **dict.fromkeys(THREADS, "1"), "OMP_WAIT_POLICY": "PASSIVE"}
        environment["TOKENIZERS_PARALLELISM"] = "false"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "splitlm.bench.worker", kind, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the parent alone, which ends the children in order
        )
        self._told: dict[str, Any] | None = None

    def __enter__(self) -> Arm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def told(self) -> dict[str, Any]:
        """What it says of itself, once it can take turns.

        Raises:
            SplitlmError: it ended instead.
        """
        if self._told is None:
            self._told = self.answer()
        return self._told

    def ready(self) -> Arm:
        """Wait until it can take turns; ``ask`` does so too.

        Raises:
            SplitlmError: it ended instead.
        """
        _ = self.told
        return self

    def ask(self, verb: str = "run", **settings: Any) -> None:
        """Begin a turn; ``answer`` waits for its end."""
        self.ready()
        if self._process.stdin is None:
            raise RuntimeError("no pipe")
        with suppress(BrokenPipeError):  # its end shows in the answer
            self._process.stdin.write(json.dumps({"do": verb, **settings}).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """What the child says next."""
        if self._process.stdout is None:
            raise RuntimeError("no pipe")
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        found: dict[str, Any] = json.loads(line)
        return found

    def run(self, verb: str = "run", **settings: Any) -> dict[str, Any]:
        """One whole turn."""
        self.ask(verb, **settings)
        return self.answer()

    def rate(self, **settings: Any) -> float:
        """One turn of generation: tokens per second."""
        took = self.run(**settings)
        return float(took["tokens"]) / float(took["seconds"])

    def _failure(self) -> SplitlmError:
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        words = next((line.removeprefix("splitlm: ") for line in lines[::-1] if line.startswith("splitlm: ")), "")
        # A group of errors ends with a rule of dashes.
        last = words or next((text for line in lines[::-1] if (text := line.strip(" |+-"))), "it said nothing")
        return from_exit_code(code if code > 0 else 1, f"The bench process '{self.kind}' ended: {last}")

    def close(self) -> None:
        """End it in order (it closes its ring), by force where it does not listen; safe to call twice."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()
