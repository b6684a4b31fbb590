"""TLS 1.3 with a certificate on both sides: what the two ends of a link need, read from a folder; no sockets.

The folder holds ``ca.pem``, ``cert.pem`` and ``key.pem``, as ``splitlm certs`` makes them. Whoever has a certificate
of that CA is let in; links compare no host names, since nodes meet by whatever address they find.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from splitlm.core.errors import NetworkError, PeerRefusedError, ProtocolError, UsageError

CA, CERTIFICATE, KEY = "ca.pem", "cert.pem", "key.pem"
MAKE = "Make certificates with splitlm certs, and give every node its own folder"

EXPIRED, TOO_EARLY, WRONG_HOST = 10, 9, 62
UNKNOWN_ISSUER = (2, 7, 18, 19, 20, 21)
"""What OpenSSL calls the ways in which a certificate fails."""
REFUSALS: Mapping[str, str] = {
    "TLSV1_ALERT_UNKNOWN_CA": "it is not signed by the CA of the other side",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it has expired",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it is no good to the other side",
    "TLSV1_ALERT_DECRYPT_ERROR": "its key does not belong to it",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "there is none",
}


@dataclass(frozen=True)
class Security:
    """What a node needs to meet others over TLS.

    Attributes:
        folder: where it came from.
        listening: the context of a listener.
        dialling: the context of a dialler.
    """

    folder: Path
    listening: ssl.SSLContext
    dialling: ssl.SSLContext


def load(folder: Path, *, check_host: bool = False) -> Security:
    """Read a node's folder, and find out now what would else fail at the first peer.

    Args:
        check_host: a dialler also wants the listener's host name in its certificate: for brokers, which have names.

    Raises:
        UsageError: a file is missing or damaged, the key belongs to another certificate, the certificate has expired
            or is not signed by the CA.
    """
    ca, certificate = _certificate(folder / CA), _certificate(folder / CERTIFICATE)
    _text(folder / KEY)
    _check_dates(ca, folder / CA)
    _check_dates(certificate, folder / CERTIFICATE)
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise UsageError(
            "The certificate is not signed by the CA beside it",
            where=str(folder / CERTIFICATE),
            expected=f"one that {folder / CA} has signed",
            remedy=MAKE,
        ) from error
    dialling = _context(folder, ssl.PROTOCOL_TLS_CLIENT)
    dialling.check_hostname = check_host
    return Security(folder, _context(folder, ssl.PROTOCOL_TLS_SERVER), dialling)


def explain(error: ssl.SSLError, where: str) -> NetworkError:
    """The error of ours for a TLS handshake or link that failed: which side did not like what."""
    if isinstance(error, ssl.SSLCertVerificationError):
        ways = {
            EXPIRED: "has expired",
            TOO_EARLY: "is not valid yet",
            WRONG_HOST: "is for another host",
            **dict.fromkeys(UNKNOWN_ISSUER, "is not signed by our CA"),
        }
        how = ways.get(error.verify_code, f"does not hold ({error.verify_message})")
        return PeerRefusedError(
            f"The peer's certificate {how}",
            where=where,
            expected="one that is valid today, made by the same splitlm certs as ours",
            remedy="Copy the peer's own folder of that CA to it, and check the clocks of both machines",
        )
    reason = error.reason or ""
    if reason in REFUSALS:
        return PeerRefusedError(
            f"The peer refused our certificate: {REFUSALS[reason]}",
            where=where,
            expected="folders of one splitlm certs on both sides",
            remedy="Give this node its own folder of the CA that the peer has",
        )
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return PeerRefusedError(
            "The peer has no certificate", where=where, remedy="Give it its own folder of splitlm certs"
        )
    return ProtocolError(
        f"The TLS connection failed ({reason.lower().replace('_', ' ') or error})",
        where=where,
        expected="a peer that speaks TLS 1.3",
        remedy="Check that both sides were given --tls (in training: security.tls), or neither",
    )


def not_tls(where: str) -> ProtocolError:
    """The error for a peer whose first bytes are no TLS."""
    return ProtocolError(
        "The peer does not speak TLS, and this side does",
        where=where,
        expected="TLS on both sides or on neither",
        remedy="Give the peer --tls (in training: security.certs) and its own folder of splitlm certs",
    )


def _context(folder: Path, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(folder / CA)
        # The password is for a key that has one: without it OpenSSL would ask on the terminal.
        context.load_cert_chain(folder / CERTIFICATE, folder / KEY, password="")
    except ssl.SSLError as error:
        mismatch = error.reason == "KEY_VALUES_MISMATCH"
        raise UsageError(
            "The key belongs to another certificate" if mismatch else "The key cannot be read",
            where=str(folder / KEY),
            expected=f"the key of {folder / CERTIFICATE}, in PEM and without a password",
            remedy=MAKE,
        ) from error
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"The file cannot be read ({error.strerror or error})",
            where=str(path),
            expected=f"a folder with {CA}, {CERTIFICATE} and {KEY}",
            remedy=MAKE,
        ) from error


def _certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(_text(path))
    except ValueError as error:
        raise UsageError(
            "This is not a certificate", where=str(path), expected="one in PEM, whole", remedy=MAKE
        ) from error


def _check_dates(certificate: x509.Certificate, path: Path) -> None:
    now, first, last = datetime.now(UTC), certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not first <= now <= last:
        raise UsageError(
            f"The certificate has expired on {last:%Y-%m-%d}" if now > last else f"It is not valid before {first:%c}",
            where=str(path),
            expected="one that is valid today",
            remedy="Make new ones with splitlm certs --force" if now > last else "Check the clock of this machine",
        )
