"""Both sides meet or part with a reason, whatever a third changes on the way."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from splitlm.core.errors import NetworkError, PeerRefusedError, ProtocolError
from splitlm.wire.frame import PROTOCOL, Answer, AnyHeader, Challenge, Close, Hello, Refused, Welcome
from splitlm.wire.handshake import AGREE, MAX_REASON, Claims, Handshake, Identity, refusal
from splitlm.wire.states import Purpose

Meddle = Callable[[AnyHeader], AnyHeader]
FULL = Claims(
    node="head",
    version="1.0",
    protocol=PROTOCOL,
    model="m1",
    weights="w1",
    tokenizer="t1",
    dtype="float32",
    ring="r1",
    epoch=3,
)
OTHER = {"version": "2.0", "protocol": PROTOCOL + 1, "epoch": 4}


def keep(header: AnyHeader) -> AnyHeader:
    return header


def meet(
    dialler: Identity,
    listener: Identity,
    *,
    purposes: tuple[Purpose, Purpose] = ("data", "data"),
    meddle: Meddle = keep,
) -> tuple[Handshake, Handshake, list[AnyHeader]]:
    """Run both sides to the end, with somebody in the middle."""
    d = Handshake("dialler", purposes[0], dialler, "the listener")
    b = Handshake("listener", purposes[1], listener, "the dialler")
    assert b.start() is None
    sides, turn, heard = (d, b), 1, []
    header = d.start()
    while header is not None:
        header = meddle(header)  # type: ignore[arg-type]
        heard.append(header)
        header = sides[turn].receive(header)
        turn = 1 - turn
    return d, b, heard


def identity(token: str = "secret", **changes: object) -> Identity:
    return Identity(msgspec.structs.replace(FULL, **changes), token)


def error(side: Handshake) -> NetworkError:
    assert side.error is not None
    assert not side.done
    return side.error


@pytest.mark.parametrize("token", ["secret", "", "ключ"])
@pytest.mark.parametrize("purpose", ["data", "control"])
def test_two_that_agree_meet_and_know_each_other(token: str, purpose: Purpose) -> None:
    d, b, heard = meet(identity(token, node="stage 1"), identity(token), purposes=(purpose, purpose))
    assert [type(h) for h in heard] == [Hello, Challenge, Answer, Welcome]
    assert d.done
    assert b.done
    assert d.claims == FULL
    assert b.claims is not None
    assert b.claims.node == "stage 1"


def test_nonces_are_new_each_time() -> None:
    nonces = {meet(identity(), identity())[2][i].nonce for i in (0, 1) for _ in range(3)}  # type: ignore[union-attr]
    assert len(nonces) == 6


@pytest.mark.parametrize(("mine", "theirs"), [("secret", "guess"), ("", "secret"), ("secret", "")])
def test_a_wrong_token_is_refused_on_both_sides_and_never_shown(mine: str, theirs: str) -> None:
    d, b, heard = meet(identity(mine), identity(theirs))
    for side in (d, b):
        text = str(error(side))
        assert isinstance(side.error, PeerRefusedError)
        assert "tokens differ" in text
        assert "SPLITLM_TOKEN" in text
        assert "--token-file" in text
        assert "secret" not in text
        assert "guess" not in text
    assert all(b"secret" not in msgspec.msgpack.encode(h) for h in heard)


def test_an_identity_does_not_show_its_token() -> None:
    assert "secret" not in repr(identity())
    assert "head" in repr(identity())


@pytest.mark.parametrize("field", AGREE)
def test_each_claim_that_differs_is_refused_with_both_values_on_both_sides(field: str) -> None:
    value = OTHER.get(field, "another")
    d, b, _ = meet(identity(node="stage 1", **{field: value}), identity())
    for side in (d, b):
        text = str(error(side))
        assert isinstance(side.error, PeerRefusedError)
        assert f"'{field}'" in text
        assert repr(value) in text
        assert repr(getattr(FULL, field)) in text
        assert "head" in text
        assert "stage 1" in text


@pytest.mark.parametrize("field", ["version", "model", "weights", "tokenizer", "dtype", "ring"])
@pytest.mark.parametrize("late", ["dialler", "listener"])
def test_a_claim_not_known_yet_is_not_compared(field: str, late: str) -> None:
    one, two = identity(**{field: ""}), identity()
    d, b, _ = meet(*((one, two) if late == "dialler" else (two, one)))
    assert d.done
    assert b.done


def test_an_epoch_belongs_to_a_model() -> None:
    d, b, _ = meet(identity(epoch=9, model=""), identity())
    assert d.done
    assert b.done


@pytest.mark.parametrize("minds", ["dialler", "listener"])
def test_a_neighbour_out_of_order_is_refused_on_both_sides_with_all_numbers(minds: str) -> None:
    far, near = identity(place=3), identity(place=2)
    d, b, _ = meet(*((near.awaiting(1), far) if minds == "dialler" else (far, near.awaiting(1))))
    for side in (d, b):
        assert "Node 3 met node 2, which expects node 1 on this link" in str(error(side))
        assert "--send" in str(error(side))
    d, b, _ = meet(near.awaiting(3), far.awaiting(2))
    assert d.done
    assert b.done


def test_the_node_name_may_differ_and_expect_chooses_what_must_not() -> None:
    d, b, _ = meet(
        Identity(msgspec.structs.replace(FULL, dtype="bfloat16"), "x", expect=["model"]),
        Identity(FULL, "x", expect=["model"]),
    )
    assert d.done
    assert b.done
    d, b, _ = meet(Identity(msgspec.structs.replace(FULL, dtype="bfloat16"), "x"), Identity(FULL, "x", expect=[]))
    assert "dtype" in str(error(d))  # the dialler alone minds, and says so after the Welcome
    assert "dtype" in str(error(b))


def test_claims_may_be_set_late() -> None:
    late = identity(model="")
    d = Handshake("dialler", "data", late)
    b = Handshake("listener", "data", identity())
    hello = d.start()
    assert isinstance(hello, Hello)
    challenge = b.receive(hello)
    late.claims = msgspec.structs.replace(FULL, model="m2")
    answer = d.receive(challenge)  # type: ignore[arg-type]
    b.receive(answer)  # type: ignore[arg-type]
    assert "'m2'" in str(error(b))


@pytest.mark.parametrize("purposes", [("data", "control"), ("control", "data")])
def test_the_wrong_purpose_is_refused_clearly(purposes: tuple[Purpose, Purpose]) -> None:
    d, b, _ = meet(identity(), identity(), purposes=purposes)
    for side in (d, b):
        assert f"wants a {purposes[0]} link, but this port is for {purposes[1]} links" in str(error(side))


def changed(kind: type, **changes: object) -> Meddle:
    def meddle(header: AnyHeader) -> AnyHeader:
        return msgspec.structs.replace(header, **changes) if isinstance(header, kind) else header

    return meddle


EVIL = msgspec.json.encode(msgspec.structs.replace(FULL, node="evil"))


@pytest.mark.parametrize(
    "meddle",
    [
        changed(Answer, claims=EVIL),
        changed(Welcome, claims=EVIL),
        changed(Challenge, proof=bytes(32)),
        changed(Answer, proof=bytes(32)),
        changed(Welcome, proof=bytes(32)),
        changed(Answer, proof=b""),
        changed(Hello, nonce=bytes(32)),
        changed(Challenge, nonce=bytes(32)),
    ],
)
@pytest.mark.parametrize("token", ["secret", ""])
def test_what_is_altered_on_the_way_is_refused(meddle: Meddle, token: str) -> None:
    """Also without a token the checks run; they then keep out accidents only."""
    d, b, _ = meet(identity(token), identity(token), meddle=meddle)
    assert isinstance(d.error or b.error, PeerRefusedError)
    assert not (d.done and b.done)
    for side in (d, b):
        assert side.claims is None or side.claims.node != "evil"


def test_a_link_cannot_be_led_to_a_port_of_another_purpose() -> None:
    d, b, _ = meet(identity(), identity(), purposes=("control", "data"), meddle=changed(Hello, purpose="data"))
    for side in (d, b):
        assert "altered on its way" in str(error(side))


def test_a_proof_cannot_be_turned_round_replayed_or_used_for_another_purpose() -> None:
    _, _, heard = meet(identity(), identity())
    proofs = [h.proof for h in heard[1:]]  # type: ignore[union-attr]
    assert len(set(proofs)) == 3
    for stolen in proofs:
        b = Handshake("listener", "data", identity())
        b.receive(heard[0])
        b.receive(Answer(stolen, msgspec.json.encode(FULL)))
        assert "tokens differ" in str(error(b))
    # One who does not know the token opens a second connection and reflects the listener's own proof.
    first, second = (Handshake("listener", "data", identity()) for _ in range(2))
    mirror = first.receive(Hello("data", b"n" * 32))
    assert isinstance(mirror, Challenge)
    second.receive(Hello("data", mirror.nonce))
    first.receive(Answer(mirror.proof, msgspec.json.encode(FULL)))
    assert "tokens differ" in str(error(first))


@pytest.mark.parametrize("nonce", [b"", b"short", bytes(33)])
def test_nonces_have_one_length(nonce: bytes) -> None:
    d, b, _ = meet(identity(), identity(), meddle=changed(Hello, nonce=nonce))
    assert "32 bytes" in str(error(b))
    d, b, _ = meet(identity(), identity(), meddle=changed(Challenge, nonce=nonce))
    assert "32 bytes" in str(error(d))
    assert error(b)


@pytest.mark.parametrize("claims", [b"", b"[]", b'{"node": 5}', b"\xff", b'{"x":' + b"[" * 4000])
def test_claims_that_cannot_be_read_are_a_protocol_error(claims: bytes) -> None:
    class Careless(Handshake):
        def _proof(self, step: str, data: bytes) -> bytes:
            return super()._proof(step, claims if step == "answer" else data)

    d = Careless("dialler", "data", identity())
    b = Handshake("listener", "data", identity())
    hello = d.start()
    assert isinstance(hello, Hello)
    answer = d.receive(b.receive(hello))  # type: ignore[arg-type]
    assert isinstance(answer, Answer)
    b.receive(Answer(answer.proof, claims))
    assert isinstance(error(b), ProtocolError)
    assert "claims could not be read" in str(error(b))


@pytest.mark.parametrize("header", [Close(1), Welcome(b"", b""), Challenge(b"", b""), Answer(b"", b"")])
def test_a_frame_out_of_turn_is_refused_with_the_state(header: AnyHeader) -> None:
    b = Handshake("listener", "data", identity())
    reply = b.receive(header)
    assert isinstance(reply, Refused)
    assert "state 'new'" in str(error(b))
    assert "Hello" in str(error(b))


def test_the_words_of_a_refusal_are_cleaned_and_cut_short() -> None:
    text = str(refusal(Refused("bad\x1b[31m\nluck" + "x" * 5000), "stage 1"))
    assert text.startswith("stage 1: The peer refused: bad [31m luck")
    assert len(text) < MAX_REASON + 100
    assert "no reason" in str(refusal(Refused(""), "stage 1"))
