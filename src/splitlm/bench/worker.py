"""The child's side of an arm: ``python -m splitlm.bench.worker KIND SETTINGS``, then one JSON line per turn.

It says one line when it is ready, answers every line it is sent, and ends when its input does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

from splitlm.core.errors import SplitlmError, UsageError

KINDS = ("ring", "uncut", "generate", "bare-ring", "bare-stage", "echo", "echo-server", "link", "link-server", "frame")
VERBS = ("run", "finish", "windows")


class Work(Protocol):
    """One kind of arm: ``told`` is its first line, ``run`` takes one turn."""

    told: dict[str, Any]

    @property
    def run(self) -> Callable[..., dict[str, Any]]:
        """Take one turn."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


def make(kind: str, settings: dict[str, Any]) -> Work:
    """The arm of this kind; each imports only what it needs.

    Raises:
        UsageError: there is no such kind.
    """
    match kind:
        case "ring":
            from splitlm.bench.generators import RingWork

            return RingWork(**settings)
        case "uncut":
            from splitlm.bench.generators import UncutWork

            return UncutWork(**settings)
        case "generate":
            from splitlm.bench.generators import TransformersWork

            return TransformersWork(**settings)
        case "bare-ring":
            from splitlm.bench.barering import BareRing

            return BareRing(**settings)
        case "bare-stage":
            from splitlm.bench.barering import BareStage

            return BareStage(**settings)
        case "echo":
            from splitlm.bench.echo import Echo

            return Echo()
        case "echo-server":
            from splitlm.bench.echo import EchoServer

            return EchoServer()
        case "link":
            from splitlm.bench.linkecho import LinkEcho

            return LinkEcho()
        case "link-server":
            from splitlm.bench.linkecho import LinkServer

            return LinkServer()
        case "frame":
            from splitlm.bench.frames import FrameWork

            return FrameWork()
    raise UsageError(f"{kind!r} is no kind of bench process", expected=", ".join(KINDS))


def serve(kind: str, settings: dict[str, Any]) -> None:
    """Be this arm until the input ends."""
    core = settings.pop("core", None)
    if core is not None:
        os.sched_setaffinity(0, {core})
    # What others print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    work = make(kind, settings)
    try:
        answers.write(json.dumps(work.told) + "\n")
        for line in sys.stdin:
            asked = json.loads(line)
            verb = asked.pop("do")
            if verb not in VERBS:
                raise UsageError(f"{verb!r} is nothing an arm can do", expected=", ".join(VERBS))
            done = getattr(work, verb)(**asked)
            answers.write(json.dumps(done) + "\n")
    finally:
        work.close()


def main() -> None:
    """Entry point of the child."""
    try:
        serve(sys.argv[1], json.loads(sys.argv[2]))
    except SplitlmError as error:
        print(f"splitlm: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
