"""How two nodes meet: challenge and answer over a shared token, then claims that must agree. No sockets.

::

    dialler                          listener
      Hello(purpose, nonce)     →
                                ←   Challenge(nonce, proof)
      Answer(proof, claims)     →
                                ←   Welcome(proof, claims)     or Refused(reason), from either side

Every proof is an HMAC-SHA256 keyed by the token, over the step, the purpose, both nonces and the prover's claims: a
proof cannot be replayed, turned round or joined to other claims. The token authenticates joining; it protects no data
that follows.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence

import msgspec

from splitlm.core.errors import NetworkError, PeerRefusedError, ProtocolError
from splitlm.wire.frame import Answer, AnyHeader, Challenge, Header, Hello, Refused, Welcome
from splitlm.wire.states import PURPOSES, Purpose, Role, Turns

NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_REASON = 1000
"""Characters of a peer's reason that are shown."""
AGREE = ("protocol", "version", "model", "weights", "tokenizer", "dtype", "ring", "epoch")
"""Claims on which two nodes of one ring must agree, in the order in which they are compared."""
_CALLED = {"model": "model config hash", "weights": "weights fingerprint", "tokenizer": "tokenizer hash"}


class Claims(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of itself when it meets another; ``""`` where it does not know yet.

    Two nodes of one ring must agree on everything but ``node`` and ``place``.

    Attributes:
        node: its name, for people.
        ring: number of the ring it belongs to: rings of one model on one machine must not be wired together.
        place: its number in the ring, 0 for the head; in training among those of its role; −1 while it has none.
        role: in training, ``owner``, ``worker`` or ``aggregator``.
    """

    node: str
    version: str
    protocol: int
    model: str = ""
    weights: str = ""
    tokenizer: str = ""
    dtype: str = ""
    ring: str = ""
    place: int = -1
    role: str = ""
    epoch: int = 0


class Identity:
    """Who this process is to its peers.

    Attributes:
        claims: read when a handshake needs them, so they may be replaced once the model is loaded.
        token: the join secret; empty when the ring has none.
        expect: the claims that a peer's must agree with.
        awaits: the place of the one node that may be at the other end; None where any may. Hidden states look the
            same in any order, so nothing later would tell two neighbours that were wired the wrong way.
    """

    __slots__ = ("awaits", "claims", "expect", "token")

    def __init__(
        self, claims: Claims, token: bytes | str = b"", expect: Sequence[str] = AGREE, awaits: int | None = None
    ) -> None:
        self.claims = claims
        self.token = token.encode() if isinstance(token, str) else bytes(token)
        self.expect = tuple(expect)
        self.awaits = awaits

    def __repr__(self) -> str:
        return f"Identity({self.claims!r}, token={'set' if self.token else 'none'})"

    def awaiting(self, place: int) -> Identity:
        """The same, for a link whose other end must be the node at ``place``."""
        return Identity(self.claims, self.token, self.expect, place)

    def check(self, theirs: Claims, where: str = "") -> None:
        """Whether a peer with these claims can join.

        A claim that is empty on either side is not compared, nor is the epoch unless both sides name a model.

        Raises:
            PeerRefusedError: it cannot; with both values.
        """
        if reason := self._difference(theirs):
            raise PeerRefusedError(reason, where=where, remedy="Start both sides with the same model and version")
        if self.awaits is not None and theirs.place != self.awaits:
            raise PeerRefusedError(
                f"Node {theirs.place} met node {self.claims.place}, which expects node {self.awaits} on this link",
                where=where,
                remedy="Check the --send and --recv addresses: each stage sends to the one that holds the next blocks",
            )

    def _difference(self, theirs: Claims) -> str:
        ours = self.claims
        for field in self.expect:
            a, b = getattr(ours, field), getattr(theirs, field)
            unknown = not (ours.model and theirs.model) if field == "epoch" else "" in (a, b)
            if a != b and not unknown:
                name = _CALLED.get(field, field)
                return f"The {name} differs: {ours.node} has {a!r}, {theirs.node} has {b!r} (claim '{field}')"
        return ""


class Handshake:
    """One side of a handshake.

    Send what ``start`` and ``receive`` return. Then either ``claims`` holds the peer's, or ``error`` says why not.

    Args:
        role: which side this is.
        purpose: what the link is for; both sides must mean the same.
        identity: who this side is.
        where: the peer, for messages.
    """

    def __init__(self, role: Role, purpose: Purpose, identity: Identity, where: str = "") -> None:
        self.role = role
        self.turns = Turns(purpose)
        self.claims: Claims | None = None
        self.error: NetworkError | None = None
        self._identity = identity
        self._where = where
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonces = b""

    def start(self) -> Header | None:
        """The first frame to send: the dialler's Hello."""
        if self.role == "listener":
            return None
        return self._say(Hello(self.turns.purpose, self._nonce))

    def receive(self, header: AnyHeader) -> Header | None:
        """Take one frame of the peer; returns the frame to send back, if any. Never raises for what a peer sent."""
        peer: Role = "listener" if self.role == "dialler" else "dialler"
        try:
            self.turns.step(peer, header, self._where)
            return self._take(header)
        except NetworkError as error:
            self.error = error
            if isinstance(header, Refused):
                return None
            return self._say(Refused(". ".join(filter(None, (error.what, error.remedy)))))

    def _say(self, header: Header) -> Header:
        self.turns.step(self.role, header, self._where)
        return header

    def _take(self, header: AnyHeader) -> Header | None:
        match header:
            case Hello():
                return self._challenge(header)
            case Challenge():
                self._remember(self._nonce, self._check_length("nonce", header.nonce, NONCE_BYTES))
                self._check_proof("challenge", header.proof, b"")
                claims = msgspec.json.encode(self._identity.claims)
                return self._say(Answer(self._proof("answer", claims), claims))
            case Answer():
                self._check_proof("answer", header.proof, header.claims)
                self._meet(header.claims)
                claims = msgspec.json.encode(self._identity.claims)
                return self._say(Welcome(self._proof("welcome", claims), claims))
            case Welcome():
                self._check_proof("welcome", header.proof, header.claims)
                self._meet(header.claims)
                return None
            case Refused():
                raise refusal(header, self._where)
            case _:
                raise ProtocolError(f"A {type(header).__name__} frame in a handshake", where=self._where)

    def _challenge(self, hello: Hello) -> Header:
        wanted = self.turns.purpose
        if hello.purpose != wanted:
            came = hello.purpose if hello.purpose in PURPOSES else repr(hello.purpose[:32])
            raise PeerRefusedError(
                f"The dialler wants a {came} link, but this port is for {wanted} links",
                where=self._where,
                remedy="Check which port the dialler was given",
            )
        self._remember(self._check_length("nonce", hello.nonce, NONCE_BYTES), self._nonce)
        return self._say(Challenge(self._nonce, self._proof("challenge", b"")))

    def _remember(self, dialler: bytes, listener: bytes) -> None:
        self._nonces = dialler + listener

    def _proof(self, step: str, claims: bytes) -> bytes:
        """HMAC of one step. Its parts cannot run into each other: names hold no ``|``, nonces have one length."""
        text = f"splitlm|{step}|{self.turns.purpose}|".encode() + self._nonces + claims
        return hmac.digest(self._identity.token, text, "sha256")

    def _check_proof(self, step: str, proof: bytes, claims: bytes) -> None:
        if not hmac.compare_digest(self._proof(step, claims), proof):
            raise PeerRefusedError(
                "The two sides' tokens differ, or the handshake was altered on its way",
                where=self._where,
                expected="the same join token on both machines "
                f"(this side has {'one' if self._identity.token else 'none'})",
                remedy="Set SPLITLM_TOKEN or --token-file to the same value on both",
            )

    def _check_length(self, name: str, value: bytes, nbytes: int) -> bytes:
        if len(value) != nbytes:
            raise ProtocolError(f"A {name} of {len(value)} bytes came", where=self._where, expected=f"{nbytes} bytes")
        return value

    def _meet(self, data: bytes) -> None:
        """Read and compare the claims of a peer that proved that it knows the token."""
        try:
            claims = msgspec.json.decode(data, type=Claims)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(
                f"A peer's claims could not be read: {error}", where=self._where, expected="claims of the same version"
            ) from error
        self._identity.check(claims, self._where)
        self.claims = claims

    @property
    def done(self) -> bool:
        """Whether both sides agreed; frames of the link's purpose may follow."""
        return self.claims is not None and self.error is None


def refusal(header: Refused, where: str) -> PeerRefusedError:
    """The error for a peer's Refused frame; its words are cut short and cleaned, since anyone may have sent them."""
    words = "".join(c if c.isprintable() else " " for c in header.reason[:MAX_REASON]).strip(" .")
    return PeerRefusedError(f"The peer refused: {words or 'it gave no reason'}", where=where)
