"""The barrier alone, over processes and TCP, without a model: does it agree, does it refuse, does it survive a death?

A head and two stand-in stages, a ring of three, are started for each question and each death.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from splitlm.check.star import Ending, Star, star
from splitlm.coordinator.state import Decision
from splitlm.core import messages as m
from splitlm.core.cut import Cut, make_cut, shift
from splitlm.core.errors import NetworkError, UsageError
from splitlm.telemetry.summary import percentile

QUESTIONS = ("happy", "nack", "kill")
CTRL_TIMEOUT_S = 1.0
NOOPS, MOVES = 200, 40
LEAVE_S = 2.0
"""A stage that has stopped may take so long, beyond the control timeout, to end as a process on a busy machine."""
VICTIM = 2
AT_ONCE = 3
"""Stars that run beside one another: starting a process costs more than a barrier."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Finding:
    """One question and its answer.

    Attributes:
        name: what was done.
        ok: whether it went as it must.
        text: what happened, in words.
        seconds: how long it took, starting and ending the processes not included.
    """

    name: str
    ok: bool
    text: str
    seconds: float


@dataclass(frozen=True)
class Answer:
    """What ``check`` found. Milliseconds in ``figures``, medians over the barriers of ``happy``."""

    ctrl_timeout_s: float
    findings: list[Finding]
    figures: dict[str, float]

    @property
    def ok(self) -> bool:
        """Whether everything went as it must."""
        return all(finding.ok for finding in self.findings)


class _WrongError(Exception):
    """Something is not as it must be."""


def check(only: str = "", ctrl_timeout_s: float = CTRL_TIMEOUT_S, say: Say = lambda _: None) -> Answer:
    """Ask one of ``QUESTIONS``, or all.

    Raises:
        UsageError: no such question, or a timeout that is not positive.
        NetworkError: the processes could not be started or joined.
    """
    if only and only not in QUESTIONS:
        raise UsageError(f"There is no question {only!r}", where="--only", expected=", ".join(QUESTIONS))
    if not 0.1 <= ctrl_timeout_s <= 3600:
        raise UsageError(f"It is {ctrl_timeout_s:g}", where="--ctrl-timeout", expected="0.1 to 3600 seconds")
    return asyncio.run(_check((only,) if only else QUESTIONS, ctrl_timeout_s, say))


async def _check(questions: Sequence[str], timeout: float, say: Say) -> Answer:
    findings: list[Finding] = []
    figures: dict[str, float] = {}
    for question in questions:
        match question:
            case "happy":
                say("happy: many barriers in a row, with and without moves")
                findings.append(await _find("happy", _happy(timeout, figures)))
            case "nack":
                say("nack: a stage refuses, another is too slow")
                findings.append(await _find("nack", _nack(timeout)))
            case _:
                say("kill: a stage dies or freezes in each state, and so does the head")
                room = asyncio.Semaphore(AT_ONCE)
                asked = [_find(str(death), _outlive(death, timeout), room) for death in DEATHS]
                asked += [_find(f"head {how}", _headless(how, timeout), room) for how in ("frozen", "gone")]
                findings += await asyncio.gather(*asked)
    return Answer(timeout, findings, figures)


async def _find(name: str, question: Coroutine[Any, Any, str], room: asyncio.Semaphore | None = None) -> Finding:
    async with room or contextlib.nullcontext():
        began = time.monotonic()
        try:
            text, ok = await question, True
        except _WrongError as error:
            text, ok = str(error), False
    return Finding(name, ok, text, time.monotonic() - began)


def _must(condition: bool, otherwise: str) -> None:
    if not condition:
        raise _WrongError(otherwise)


def _agree(endings: Sequence[Ending], cut: Cut) -> None:
    """Every stage left when it was told to, in order, and holds this cut."""
    for ending in endings:
        _must(ending.code == 0, f"Node {ending.node} ended with exit code {ending.code}: {_error(ending)}")
        held = ending.last.cut if ending.last else None
        _must(held == cut, f"Node {ending.node} holds {_edges(held)}, the head {_edges(cut)}")


def _error(ending: Ending) -> str:
    return ending.last.error if ending.last else "it said nothing"


def _edges(cut: Cut | None) -> str:
    return f"epoch {cut.epoch} with boundaries {cut.boundaries}" if cut else "nothing"


async def _happy(timeout: float, figures: dict[str, float]) -> str:
    async with star(make_cut(18, (6, 12)), timeout) as made:
        lead = made.coordinator
        noops = [await lead.barrier() for _ in range(NOOPS)]
        moves = []
        for i in range(MOVES):
            cut = shift(lead.cut, 1 + i % 2, -1 if i // 2 % 2 else 1)
            await lead.announce(cut)
            _must(await lead.staged(timeout), f"What barrier {NOOPS + i + 1} needs was not staged in {timeout:g} s")
            moves.append(await lead.barrier(Decision("forced-shift", cut)))
        await made.dismiss()
        endings = await made.endings(time.monotonic())
    for outcome in (*noops, *moves):
        _must(outcome.committed, f"Barrier {outcome.seq} was aborted: {outcome.reason}")
    _must(moves[-1].epoch == MOVES and moves[-1].seq == NOOPS + MOVES, "Epochs or numbers were skipped")
    _agree(endings, moves[-1].cut)
    tails = [ending.last.p50_ms for ending in endings if ending.last and ending.last.p50_ms is not None]
    figures |= {
        "barrier_p50_ms": median(o.barrier_ms for o in noops),
        "barrier_p99_ms": percentile([o.barrier_ms for o in noops], 99),
        "prestage_p50_ms": median(o.prestage_ms or 0.0 for o in noops),
        "commit_p50_ms": median(o.commit_ms or 0.0 for o in noops),
        "move_p50_ms": median(o.barrier_ms for o in moves),
        "stage_p50_ms": max(tails),
    }
    return (
        f"a ring of 3, {NOOPS} noop barriers and {MOVES} moves; "
        f"barrier p50 {figures['barrier_p50_ms']:.2f} ms, p99 {figures['barrier_p99_ms']:.2f} ms; "
        f"moves p50 {figures['move_p50_ms']:.2f} ms; all ended in epoch {moves[-1].epoch}"
    )


async def _nack(timeout: float) -> str:
    old = make_cut(9, (3, 6))
    move = Decision("forced-shift", shift(old, 1, 1))
    async with star(old, timeout, node1={"slow": 4}, node2={"refuse": 2}) as made:
        lead = made.coordinator
        outcomes = [await lead.barrier(d) for d in (Decision(), move, Decision(), move, move, Decision())]
        await made.dismiss()
        endings = await made.endings(time.monotonic())
    verdicts = [(o.committed, o.epoch) for o in outcomes]
    expected = [(True, 0), (False, 0), (True, 0), (False, 0), (True, 1), (True, 1)]
    _must(verdicts == expected, f"The barriers ended as {verdicts}, expected {expected}")
    refused, slow = outcomes[1].reason, outcomes[3].reason
    _must(refused.startswith("Node 2 refused"), f"The refusal was told as: {refused}")
    _must(slow.startswith("Node 1 did not say READY"), f"The slow stage was told as: {slow}")
    _agree(endings, outcomes[-1].cut)
    return f"{refused}; {slow}; the old epoch served on each time, and the same move was then committed"


@dataclass(frozen=True)
class Death:
    """How node 2 ends in barrier 2, in which of its own states, and where the head may be when it learns of it."""

    by: str
    state: str
    heads: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.by} in '{self.state}'"


DEATHS = (
    Death("SIGKILL", "preparing", ("gathering",)),
    Death("SIGKILL", "prepared", ("gathering", "committing")),
    Death("SIGKILL", "committed", ("committing",)),
    Death("SIGKILL", "idle", ("committing", "idle")),
    Death("SIGSTOP", "preparing", ("gathering",)),
    Death("SIGSTOP", "prepared", ("committing",)),
    Death("SIGSTOP", "committed", ("committing",)),
    Death("SIGSTOP", "idle", ("gathering",)),
)


async def _outlive(death: Death, timeout: float) -> str:
    end = {"end_at": 2, "end_in": death.state, "end_by": int(signal.Signals[death.by])}
    async with star(make_cut(9, (3, 6)), timeout, node2=end) as made:
        await made.coordinator.barrier()
        began = time.monotonic()
        text, stopped = await _meet(made, timeout)
        took = time.monotonic() - began
        if not stopped:
            await made.dismiss()
        endings = await made.endings(began, kill=(VICTIM,) if death.by == "SIGSTOP" else (), timeout=LEAVE_S)
        served = made.coordinator.cut
    _must(took <= timeout, f"The head needed {took:.2f} s, longer than the control timeout of {timeout:g} s: {text}")
    named = any(f"in state '{where}'" in text for where in death.heads)
    _must(f"Node {VICTIM} " in text and named, f"The diagnosis does not name node {VICTIM} and {death.heads}: {text}")
    survivor, victim = endings
    _must(victim.code == -signal.SIGKILL, f"Node {VICTIM} ended with exit code {victim.code}, not by the signal")
    if not stopped:
        _agree([survivor], served)
        return f"aborted after {took:.2f} s: {text}"
    error = _error(survivor)
    _must(survivor.code == NetworkError.exit_code, f"Node 1 ended with exit code {survivor.code}: {error}")
    _must(f"Node {VICTIM} " in error and "in state '" in error, f"Node 1 does not know why it ended: {error}")
    _must(survivor.seconds <= timeout + LEAVE_S, f"Node 1 ended after {survivor.seconds:.1f} s")
    half = survivor.last is not None and survivor.last.cut != served and "'gathering'" in text
    _must(not half, "Node 1 applied what was never committed")
    return f"all stopped after {took:.2f} s: {text}"


async def _meet(made: Star, timeout: float) -> tuple[str, bool]:
    """Lead on until the death shows: what is said of it, and whether the ring stops."""
    lead = made.coordinator
    try:
        outcome = await lead.barrier(Decision("forced-shift", shift(lead.cut, 1, 1)))
        if outcome.committed:
            # It died or froze after DONE: a loss shows by itself, silence only when something is asked.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout / 10):
                    while lead.failure is None:
                        await made.changed.wait()
                        made.changed.clear()
            outcome = await lead.barrier()
    except NetworkError as error:
        return str(error), True
    _must(outcome.aborted, f"Barrier {outcome.seq} was committed without node {VICTIM}")
    return outcome.reason, False


async def _headless(how: str, timeout: float) -> str:
    """The head freezes or is gone while every stage is READY: none may decide alone."""
    old = make_cut(9, (3, 6))
    async with star(old, timeout) as made:
        for node in (1, 2):
            await made.send(node, m.Prepare(1, 1, "forced-shift", shift(old, 1, 1)))
        await made.until("say READY", (1, 2), made.prepared, timeout)
        began = time.monotonic()
        if how == "gone":
            await made.vanish()
        endings = await made.endings(began, timeout=timeout + LEAVE_S)
    reason = "said neither COMMIT nor ABORT in time" if how == "frozen" else "was lost"
    for ending in endings:
        error = _error(ending)
        _must(ending.code == NetworkError.exit_code, f"Node {ending.node} ended with exit code {ending.code}: {error}")
        whole = error.startswith(f"The head {reason}") and "in state 'prepared' of barrier 1; state unknown" in error
        _must(whole, f"Node {ending.node} does not know why it ended: {error}")
        _must(ending.last is not None and ending.last.cut == old, f"Node {ending.node} decided alone")
    return f"all stages stopped after {max(ending.seconds for ending in endings):.2f} s: {_error(endings[0])}"
