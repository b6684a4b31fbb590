"""The child's side of an arm: ``python -m splitlm.bench.worker KIND SETTINGS``, then one JSON line per turn.

It says one line when it is ready, answers every line it is sent, and ends when its input does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Protocol

from splitlm.core.errors import SplitlmError, UsageError

KINDS: Mapping[str, str] = {
    "ring": "generators:RingWork",
    "uncut": "generators:UncutWork",
    "generate": "generators:TransformersWork",
    "batch": "engines:BatchWork",
    "load": "engines:LoadWork",
    "llama": "llamacpp:LlamaWork",
    "bare-ring": "barering:BareRing",
    "bare-stage": "barering:BareStage",
    "echo": "echo:Echo",
    "echo-server": "echo:EchoServer",
    "link": "linkecho:LinkEcho",
    "link-server": "linkecho:LinkServer",
    "frame": "frames:FrameWork",
    "train": "trainrun:TrainWork",
    "train-party": "trainparty:PartyWork",
    "train-uncut": "trainuncut:UncutTrainWork",
    "train-plain": "trainuncut:PlainTrainWork",
    "train-shares": "trainuncut:SharesWork",
    "train-pipe": "trainpipe:PipeWork",
    "train-pipe-stage": "trainpipe:PipeStage",
    "train-lanes": "trainlanes:LaneEcho",
    "train-lane-server": "trainlanes:LaneServer",
}
"""The module of this room and the class of each kind; only the one that is asked for is imported."""
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
    if kind not in KINDS:
        raise UsageError(f"{kind!r} is no kind of bench process", expected=", ".join(KINDS))
    module, _, name = KINDS[kind].partition(":")
    made: Work = getattr(import_module(f"splitlm.bench.{module}"), name)(**settings)
    return made


def serve(kind: str, settings: dict[str, Any]) -> None:
    """Be this arm until the input ends."""
    core = settings.pop("core", None)
    if core is not None:
        os.sched_setaffinity(0, {core})
    if settings.pop("spin", False):
        # Several threads of one process hand over faster where they wait as OpenMP does by itself; torch reads this.
        os.environ.pop("OMP_WAIT_POLICY", None)
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
