"""The barrier's table: every event has its row, the promises hold in a hostile world, and broken tables are caught."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitlm.core import barrier
from splitlm.core.barrier import TABLE, Event, Follower, Leader, Table, compiled, step
from splitlm.core.barrier_rows import FOLLOWER, LEADER, Row

from .barrier_world import HARMLESS, HOSTILE, REFUSING, Violation, World

PAGE = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"
SCHEDULES = st.lists(st.integers(0, 10**6), max_size=120)
COUNTS = st.integers(1, 4)


# The promises


@settings(max_examples=400, deadline=None)
@given(COUNTS, SCHEDULES)
def test_nothing_is_half_applied_whatever_is_lost_repeated_reordered_or_killed(count: int, schedule: list[int]) -> None:
    world = World(count)
    world.play(schedule, HOSTILE)
    world.settle(timeouts=True)


@settings(max_examples=200, deadline=None)
@given(COUNTS, SCHEDULES)
def test_without_loss_every_barrier_ends_and_nobody_stops(count: int, schedule: list[int]) -> None:
    world = World(count)
    world.play(schedule, REFUSING)
    world.settle(timeouts=False)
    assert not world.someone_stopped
    assert [seq for _, seq in world.reports] == list(range(1, world.begun + 1))


@settings(max_examples=100, deadline=None)
@given(COUNTS, SCHEDULES)
def test_without_loss_and_refusals_every_barrier_commits(count: int, schedule: list[int]) -> None:
    world = World(count)
    world.play(schedule, HARMLESS)
    world.settle(timeouts=False)
    assert {word for word, _ in world.reports} <= {"committed"}
    assert len(world.reports) == world.begun
    assert {s.epoch for s in world.followers.values()} == {world.leader.epoch}


def soak(table: Table, rounds: int = 3000, seed: int = 1) -> None:
    """The same three worlds on random schedules; hostile moves are kept rare so that barriers get far."""
    rng = random.Random(seed)
    for i in range(rounds):
        world = World(1 + i % 4, table)
        schedule = [rng.randrange(10**6) for _ in range(rng.randrange(5, 90))]
        kinds = (HARMLESS, REFUSING, HOSTILE)[i % 3]
        world.play(schedule, kinds)
        world.settle(timeouts=kinds is HOSTILE)
        if kinds is not HOSTILE and (world.someone_stopped or len(world.reports) != world.begun):
            raise Violation("without loss, a barrier did not end")
        if kinds is HARMLESS and any(word != "committed" for word, _ in world.reports):
            raise Violation("without loss and refusals, a barrier was aborted")


def test_the_soak_passes_on_the_table_as_it_is_and_reaches_every_state() -> None:
    seen: set[tuple[str, str, str, str]] = set()

    class Watched(dict):  # type: ignore[type-arg]
        def get(self, key, default=None):  # type: ignore[no-untyped-def]
            seen.add(key)
            return super().get(key, default)

    soak(Watched(TABLE), rounds=4000)
    unseen = {key for key in TABLE if key not in seen}
    # A correct leader and correct followers never get there; the rows are for those of another kind.
    foreign = {key for key, row in TABLE.items() if row.does == ("stop: violation",) or key[3] == "bad epoch"}
    foreign |= {("follower", "committed", "failed", "same"), ("leader", "aborting", "NACK", "repeat")}
    foreign |= {("follower", "preparing", "ABORT", "newer")}  # it would take more luck than a soak has
    assert unseen - foreign == set()
    assert len(foreign) < len(TABLE) / 2


# Mutants: one row changed, and the soak must notice

MUTANTS: dict[str, tuple[tuple[str, str, str, str], dict[str, object]]] = {
    "the leader commits before the last READY": (
        ("leader", "gathering", "READY", "more"),
        {"then": "committing", "sets": ("await all", "decide"), "does": ("say COMMIT",)},
    ),
    "the leader takes a NACK for a READY": (
        ("leader", "gathering", "NACK", "all"),
        {"then": "committing", "sets": ("await all", "decide"), "does": ("say COMMIT",)},
    ),
    "the leader commits at a timeout": (
        ("leader", "gathering", "timeout", "same"),
        {"then": "committing", "sets": ("await all", "decide"), "does": ("say COMMIT",)},
    ),
    "the leader aborts after COMMIT": (("leader", "committing", "timeout", "same"), {"does": ("say ABORT",)}),
    "the leader goes on after a timeout while committing": (
        ("leader", "committing", "timeout", "same"),
        {"then": "idle", "does": ("report committed",)},
    ),
    "the leader goes on without a lost follower": (
        ("leader", "committing", "lost", ""),
        {"then": "idle", "does": ("report committed",)},
    ),
    "the leader forgets to say ABORT": (("leader", "gathering", "NACK", "more"), {"does": ("stop timer",)}),
    "the leader counts the same DONE twice": (
        ("leader", "committing", "DONE", "repeat"),
        {"then": "idle", "does": ("stop timer", "report committed")},
    ),
    "the leader ends at the first DONE": (
        ("leader", "committing", "DONE", "more"),
        {"then": "idle", "does": ("stop timer", "report committed")},
    ),
    "the leader counts a READY of an old barrier": (
        ("leader", "gathering", "READY", "older"),
        {"then": "committing", "sets": ("await all", "decide"), "does": ("say COMMIT",)},
    ),
    "a follower aborts alone after READY": (
        ("follower", "prepared", "timeout", "same"),
        {"then": "idle", "does": ("discard",)},
    ),
    "a follower commits alone after READY": (
        ("follower", "prepared", "timeout", "same"),
        {"then": "committed", "does": ("apply",)},
    ),
    "a follower says READY when its time is up": (
        ("follower", "preparing", "timeout", "same"),
        {"then": "prepared", "does": ("say READY",)},
    ),
    "a follower says READY again instead of waiting": (
        ("follower", "preparing", "PREPARE", "same"),
        {"then": "prepared", "does": ("say READY",)},
    ),
    "a follower says DONE and serves the old epoch": (("follower", "committed", "applied", "same"), {"sets": ()}),
    "a follower applies at PREPARE": (
        ("follower", "idle", "PREPARE", "newer"),
        {"then": "committed", "does": ("apply",)},
    ),
    "a follower prepares what was aborted": (
        ("follower", "idle", "PREPARE", "dropped"),
        {"then": "preparing", "sets": ("take",), "does": ("start timer", "prepare")},
    ),
    "a follower prepares what was applied, again": (
        ("follower", "idle", "PREPARE", "applied"),
        {"then": "preparing", "sets": ("take",), "does": ("start timer", "prepare")},
    ),
    "a follower forgets an ABORT that came first": (("follower", "idle", "ABORT", "newer"), {"sets": ()}),
    "a follower takes an old ABORT for its own": (
        ("follower", "prepared", "ABORT", "older"),
        {"then": "idle", "does": ("stop timer", "discard")},
    ),
    "a follower sticks to an aborted barrier": (
        ("follower", "prepared", "PREPARE", "newer"),
        {"then": None, "sets": (), "does": ()},
    ),
    "a follower ignores ABORT": (("follower", "prepared", "ABORT", "same"), {"then": None, "does": ()}),
    "a follower that is idle does not mind the loss of the head": (("follower", "idle", "lost", ""), {"then": None}),
    "a follower waits for ever after READY": (("follower", "prepared", "timeout", "same"), {"then": None, "does": ()}),
    "the leader waits for ever for READY": (("leader", "gathering", "timeout", "same"), {"then": None, "does": ()}),
    "the leader goes on gathering without a lost follower": (("leader", "gathering", "lost", ""), {"then": None}),
    "the leader forgets a loss between barriers": (("leader", "idle", "lost", ""), {"then": None}),
    "a follower goes on when the head is lost": (
        ("follower", "prepared", "lost", ""),
        {"then": "idle", "does": ("stop timer", "discard")},
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_table_with_one_wrong_row_is_caught(name: str) -> None:
    key, changes = MUTANTS[name]
    table = {**TABLE, key: TABLE[key]._replace(**changes)}  # type: ignore[index, arg-type]
    assert table[key] != TABLE[key]  # type: ignore[index]
    with pytest.raises(Violation):
        soak(table)


# The table itself


def test_every_message_has_a_row_in_every_state() -> None:
    relations = {
        "PREPARE": ("older", "same", "newer", "bad epoch"),
        "COMMIT": ("older", "same", "newer"),
        "ABORT": ("older", "same", "newer"),
    }
    for where, on in product(("idle", "preparing", "prepared", "committed"), relations):
        for which in relations[on]:
            over = ("dropped", "applied") if which == "same" and where == "idle" else (which,)
            assert all(("follower", where, on, w) in TABLE for w in over), (where, on, which)
        assert ("follower", where, "lost", "") in TABLE
    for where, on in product(("gathering", "aborting", "committing"), ("READY", "NACK", "DONE")):
        assert all(("leader", where, on, w) in TABLE for w in ("older", "newer", "more", "all", "repeat"))
    for on in ("READY", "NACK", "DONE"):
        assert all(("leader", "idle", on, w) in TABLE for w in ("older", "newer", "dropped", "applied"))


def test_two_rows_for_one_event_are_refused() -> None:
    with pytest.raises(RuntimeError, match="two rows for leader idle lost"):
        compiled("leader", (*LEADER, Row(("idle",), "lost")))


def test_after_a_violation_nothing_moves() -> None:
    stopped = Follower("stopped", 3, 7)
    for on in ("PREPARE", "COMMIT", "ABORT", "ready", "timeout", "lost"):
        assert step(stopped, Event(on, 8, 4)) == (stopped, ())  # type: ignore[arg-type]


def follower(*events: Event) -> tuple[Follower, list[str]]:
    state, done = Follower(), []
    for event in events:
        state, actions = step(state, event)
        done = [action.does for action in actions]
    return state, done


P1, C1, A1, R1, D1 = (
    Event("PREPARE", 1, 1),
    Event("COMMIT", 1, 1),
    Event("ABORT", 1),
    Event("ready", 1),
    Event("applied", 1),
)


@pytest.mark.parametrize(
    ("events", "where", "epoch", "done"),
    [
        ([P1], "preparing", 0, ["start timer", "prepare"]),
        ([P1, R1], "prepared", 0, ["start timer", "say READY"]),
        ([P1, R1, P1], "prepared", 0, ["say READY"]),
        ([P1, R1, C1], "committed", 0, ["stop timer", "apply"]),
        ([P1, R1, C1, C1], "committed", 0, []),
        ([P1, R1, C1, D1], "idle", 1, ["say DONE"]),
        ([P1, R1, C1, D1, C1], "idle", 1, ["say DONE"]),
        ([P1, R1, C1, D1, P1], "idle", 1, []),
        ([P1, R1, C1, D1, A1], "stopped", 1, ["stop: violation"]),
        ([P1, R1, C1, A1], "stopped", 0, ["stop: violation"]),
        ([P1, R1, A1], "idle", 0, ["stop timer", "discard"]),
        ([P1, R1, A1, P1], "idle", 0, []),
        ([P1, Event("ABORT", 2)], "idle", 0, ["stop timer", "discard"]),
        ([P1, R1, Event("ABORT", 2), Event("PREPARE", 2, 1)], "idle", 0, []),
        ([P1, R1, A1, C1], "stopped", 0, ["stop: violation"]),
        ([P1, C1], "stopped", 0, ["stop: violation"]),
        ([C1], "stopped", 0, ["stop: violation"]),
        ([Event("COMMIT", 0, 0)], "stopped", 0, ["stop: violation"]),
        ([P1, R1, Event("COMMIT", 1, 2)], "stopped", 0, ["stop: violation"]),
        ([P1, Event("failed", 1, reason="disk full")], "idle", 0, ["stop timer", "discard", "say NACK"]),
        ([P1, Event("timeout", 1)], "idle", 0, ["discard", "say NACK"]),
        ([P1, Event("timeout", 1), R1], "idle", 0, []),
        ([P1, R1, Event("timeout", 1)], "stopped", 0, ["stop: state unknown"]),
        ([P1, R1, Event("timeout", 0)], "prepared", 0, []),
        ([P1, Event("lost")], "stopped", 0, ["stop timer", "discard", "stop: peer lost"]),
        ([P1, R1, Event("lost")], "stopped", 0, ["stop timer", "stop: state unknown"]),
        ([Event("PREPARE", 1, 2)], "idle", 0, ["say NACK"]),
        ([P1, R1, C1, D1, Event("PREPARE", 2, 0)], "idle", 1, ["say NACK"]),
        ([P1, R1, C1, Event("failed", 1)], "stopped", 0, ["stop: state unknown"]),
    ],
)
def test_the_ways_of_a_follower(events: list[Event], where: str, epoch: int, done: list[str]) -> None:
    state, last = follower(*events)
    assert (state.where, state.epoch, last) == (where, epoch, done)


def test_an_aborted_epoch_may_be_proposed_again() -> None:
    again = [Event("PREPARE", 2, 1), Event("ready", 2), Event("COMMIT", 2, 1), Event("applied", 2)]
    state, _ = follower(P1, R1, A1, *again)
    assert (state.where, state.epoch, state.seq) == ("idle", 1, 2)


def leader(*events: Event) -> tuple[Leader, list[str], str]:
    state, done, reason = Leader(frozenset({0, 1, 2})), [], ""
    for event in events:
        state, actions = step(state, event)
        done = [action.does for action in actions]
        reason = actions[-1].reason if actions else ""
    return state, done, reason


BEGIN = Event("begin", 1, 1)
READY = [Event("READY", 1, node=i) for i in range(3)]


@pytest.mark.parametrize(
    ("events", "where", "done", "says"),
    [
        ([BEGIN, Event("timeout", 1)], "aborting", "say ABORT", "Nodes 0, 1, 2 did not say READY in time"),
        ([BEGIN, *READY[:2], Event("timeout", 1)], "aborting", "say ABORT", "Node 2 did not say READY in time"),
        ([BEGIN, Event("NACK", 1, node=1, reason="no disk.")], "aborting", "say ABORT", "Node 1 refused: no disk in"),
        (
            [BEGIN, Event("lost", node=2, reason="reset")],
            "stopped",
            "stop: peer lost",
            "Node 2 was lost: reset in state 'gathering' of barrier 1",
        ),
        (
            [BEGIN, *READY, Event("timeout", 1)],
            "stopped",
            "stop: state unknown",
            "Nodes 0, 1, 2 did not say DONE in time in state 'committing' of barrier 1; state unknown",
        ),
        ([BEGIN, *READY, Event("lost", node=1)], "stopped", "stop: state unknown", "Node 1 was lost in state 'commit"),
        ([BEGIN, Event("DONE", 1, node=1)], "stopped", "stop: violation", "Node 1 said DONE of barrier 1 out of turn"),
        ([Event("lost", node=1)], "stopped", "stop: peer lost", "Node 1 was lost in state 'idle'"),
    ],
)
def test_the_ways_of_a_leader_and_what_it_says(events: list[Event], where: str, done: str, says: str) -> None:
    state, last, reason = leader(*events)
    assert (state.where, last[-1]) == (where, done)
    assert reason.startswith(says)


def test_a_barrier_that_is_not_over_cannot_be_followed_by_another() -> None:
    state, _, _ = leader(BEGIN)
    with pytest.raises(RuntimeError, match="gathering cannot take"):
        step(state, Event("begin", 2, 1))


def test_states_are_values() -> None:
    state = Follower()
    after, _ = step(state, P1)
    assert state == Follower() and after != state
    with pytest.raises(AttributeError):
        after.where = "idle"  # type: ignore[misc]
    assert msgspec.structs.replace(after, seq=9) != after


@pytest.mark.parametrize("made", [barrier.markdown, barrier.mermaid])
def test_the_page_holds_the_table_as_it_is(made: Callable[[], str]) -> None:
    assert made() in PAGE.read_text(encoding="utf-8")
    assert len(FOLLOWER) + len(LEADER) > 40
