"""The table of turns, and that the page about it is current."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitlm.core.errors import ProtocolError
from splitlm.core.sampling import Sampling
from splitlm.wire import states
from splitlm.wire.frame import AnyHeader, Close, Failed, Header, Hello, Hidden, Open, Refused, Said, Token, Welcome
from splitlm.wire.states import MEANING, OPEN, PURPOSES, TABLE, Purpose, Role, Turns

PAGE = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"

OPENED, HIDDEN, CLOSED = Open(1, 10, Sampling()), Hidden(1, 0, 0, True), Close(1)
FAILED = Failed(1, 4, "no")
TOKEN, SAID, REFUSED = Token(1, 0, 1, 5), Said(b"{}"), Refused("no")


def walk(purpose: Purpose, *steps: tuple[Role, Header]) -> Turns:
    turns = Turns(purpose, OPEN[purpose])
    for sender, header in steps:
        turns.step(sender, header)
    return turns


@pytest.mark.parametrize(
    ("purpose", "headers", "state"),
    [
        ("data", [OPENED, HIDDEN, OPENED, HIDDEN, CLOSED, HIDDEN], "sessions"),
        ("data", [TOKEN, TOKEN], "tokens"),
        ("data", [OPENED, FAILED, HIDDEN, FAILED, CLOSED], "sessions"),
        ("data", [FAILED, TOKEN, FAILED], "tokens"),
        ("data", [REFUSED], "refused"),
        ("control", [SAID, SAID], "talking"),
        ("control", [SAID, REFUSED], "refused"),
    ],
)
def test_the_ways_of_a_ring_are_allowed(purpose: Purpose, headers: list[Header], state: str) -> None:
    assert walk(purpose, *(("dialler", h) for h in headers)).state == state


@pytest.mark.parametrize(
    ("purpose", "before", "sender", "header", "words"),
    [
        ("data", [], "dialler", HIDDEN, r"A Hidden frame from the dialler in state 'linked'.*Open or Token or Fence"),
        ("data", [], "listener", TOKEN, r"A Token frame from the listener in state 'linked'.*Expected Refused"),
        ("data", [OPENED], "dialler", TOKEN, "A Token frame .* 'sessions' .*Open or Hidden or Close"),
        (
            "data",
            [TOKEN],
            "dialler",
            HIDDEN,
            "A Hidden frame .* 'tokens' .*Expected Token or Fence or Failed or Refused",
        ),
        ("data", [FAILED], "dialler", OPENED, "An? Open frame .* 'tokens'"),
        ("data", [], "listener", FAILED, "A Failed frame from the listener"),
        ("data", [OPENED], "dialler", SAID, "A Said frame"),
        ("data", [OPENED], "listener", HIDDEN, "from the listener"),
        ("control", [], "dialler", HIDDEN, "A Hidden frame .* 'talking' of a control link.*Expected Said"),
        ("control", [REFUSED], "listener", SAID, "Expected nothing from the listener in this state"),
        ("data", [], "dialler", Hello("data", b""), "A Hello frame"),
        ("data", [], "listener", Welcome(b"", b""), "A Welcome frame"),
    ],
)
def test_a_frame_out_of_turn_names_the_state_and_what_it_allows(
    purpose: Purpose, before: list[Header], sender: Role, header: Header, words: str
) -> None:
    turns = walk(purpose, *(("dialler", h) for h in before))
    state = turns.state
    with pytest.raises(ProtocolError, match=f"^peer: .*{words}"):
        turns.step(sender, header, "peer")
    assert turns.state == state


def test_every_kind_of_frame_has_its_place_and_every_state_is_reached() -> None:
    tables = [TABLE[purpose] for purpose in PURPOSES]
    assert {kind for table in tables for _, _, kind in table} == set(AnyHeader.__args__)
    assert {"new"} | {state for table in tables for state in table.values()} == set(MEANING)
    for table in tables:
        left = {state for state, _, _ in table}
        assert all(after in left or after == "refused" for after in table.values())


def test_no_state_follows_a_refusal() -> None:
    for purpose in PURPOSES:
        assert not [state for state, _, _ in TABLE[purpose] if state == "refused"]


def test_the_page_holds_the_tables_as_they_are() -> None:
    assert states.markdown() in PAGE.read_text(encoding="utf-8")
