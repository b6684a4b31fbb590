"""``splitlm certs``: a certificate authority of one's own, and a folder for each node; and the option to use one."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splitlm.cli.console import console
from splitlm.core.errors import UsageError

_log = logging.getLogger("splitlm.cli")

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

    Pair = tuple[x509.Certificate, EllipticCurvePrivateKey]

TlsFolder = Annotated[
    str,
    typer.Option(
        "--tls",
        metavar="DIR|off",
        help="This node's folder of splitlm certs: links are encrypted, and only nodes of that authority meet.",
    ),
]
AUTHORITY = "authority"
"""The folder that holds the CA's key: it stays where it was made."""
LONGEST = 253
"""Letters of a name, which is a host's too."""
LONGEST_DAYS = 1_000_000
"""A certificate ends before the year 10000."""
SKEW = timedelta(hours=1)
"""How far the clock of a node may be behind."""


def certs(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the folders are made.")],
    name: Annotated[list[str] | None, typer.Option(help="A node; several (default: node-0, node-1).")] = None,
    host: Annotated[
        list[str] | None, typer.Option(help="Host name or address of the nodes, for brokers; localhost always is one.")
    ] = None,
    days: Annotated[int, typer.Option(help="How long they are valid.")] = 365,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
) -> None:
    """Make certificates for TLS: an authority (CA), and one folder to copy to each node."""
    names = list(dict.fromkeys(name or ["node-0", "node-1"]))
    for each in names:
        if each in (AUTHORITY, ".", "..") or not _plain(each):
            raise UsageError(
                f"{each[:80]!r} is no name",
                where="--name",
                expected=f"1 to {LONGEST} letters from a to z, digits, - _ and ., and not {AUTHORITY}",
            )
    if not 1 <= days <= LONGEST_DAYS:
        raise UsageError(f"It is {days}", where="--days", expected=f"from 1 to {LONGEST_DAYS}")
    targets = [folder / each for each in (AUTHORITY, *names)]
    taken = [target for target in targets if target.exists()]
    if taken and not force:
        raise UsageError(
            f"There is {taken[0]} already",
            where=str(folder),
            expected="an empty place: nodes with certificates of two authorities do not meet",
            remedy="Choose another folder, or give --force to replace all of them",
        )
    for each in host or []:
        _general_name(each)
    make(folder, names, ["localhost", "127.0.0.1", "::1", *(host or [])], days)
    voice = console(context)
    for each in names:
        voice.out(f"{folder / each}  copy to {each}, then use --tls with that folder there")
    voice.out(f"{folder / AUTHORITY}  keep here: whoever has this key can make further nodes")


def tls_folder(text: str, *ends: tuple[str, int]) -> str | None:
    """The folder with this node's certificate; None for plain links, with a warning where they leave this machine.

    Args:
        ends: addresses at which this node listens, or to which it connects.
    """
    if text not in ("", "off"):
        return text
    outward = [host for host, _ in ends if not loopback(host)]
    if outward:
        _log.warning(
            "What is sent to and from %s is not encrypted: whoever is on the way can read and change it%s",
            outward[0],
            ""
            if text
            else ". Make certificates with splitlm certs and give each node its own with --tls, or say --tls off",
        )
    return None


def loopback(host: str) -> bool:
    """Whether an address is this machine's own; an empty one is one that is not said."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("", "localhost")


def make(folder: Path, names: list[str], hosts: list[str], days: int) -> None:
    """Write ``authority/`` and one folder for each node, each with ca.pem, cert.pem and key.pem: all, or nothing.

    Raises:
        UsageError: a host is none, or a folder cannot be written.
    """
    ca = signed("splitlm authority", days, None, [])
    pairs = {AUTHORITY: ca, **{each: signed(each, days, ca, [each, *hosts]) for each in names}}
    try:
        with contextlib.ExitStack() as undo:
            for place in (*reversed(folder.parents), folder):
                _make_folder(place, undo, 0o777)
            ready = Path(tempfile.mkdtemp(prefix=".certs-", dir=folder))
            undo.callback(shutil.rmtree, ready, ignore_errors=True)
            for each, pair in pairs.items():
                write(ready / "new" / each, ca[0], pair)
            for each in pairs:
                _make_folder(folder / each, undo, 0o700)
                for file in sorted((ready / "new" / each).iterdir()):
                    _put(file, folder / each / file.name, ready / f"{each}-{file.name}", undo)
            undo.pop_all()
            shutil.rmtree(ready, ignore_errors=True)
    except OSError as error:
        raise UsageError(f"It cannot be written ({error.strerror or error})", where=str(folder)) from error


def _make_folder(folder: Path, undo: contextlib.ExitStack, mode: int) -> None:
    """Make a folder that is not there, to be taken away again."""
    if not folder.is_dir():
        folder.mkdir(mode=mode)
        undo.callback(_forget, folder.rmdir)


def _put(file: Path, target: Path, old: Path, undo: contextlib.ExitStack) -> None:
    """Move a file to its place; the one that was there, if any, is kept, to be put back."""
    if target.exists():
        target.rename(old)
        undo.callback(_forget, lambda: old.replace(target))
    else:
        undo.callback(_forget, lambda: target.unlink(missing_ok=True))
    file.rename(target)


def _forget(step: Callable[[], object]) -> None:
    """One step back; one that fails does not keep the others from being taken."""
    with contextlib.suppress(OSError):
        step()


def _plain(text: str) -> bool:
    return 0 < len(text) <= LONGEST and text.isascii() and all(c.isalnum() or c in "-_." for c in text)


def signed(name: str, days: int, issuer: Pair | None, hosts: list[str], now: datetime | None = None) -> Pair:
    """A key with its certificate, valid from ``now`` on; without an issuer it is the authority's own."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID as Usage

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:64])])
    signer = issuer[1] if issuer else key
    now = now or datetime.now(UTC)
    usage = x509.KeyUsage(
        digital_signature=issuer is not None,
        key_cert_sign=issuer is None,
        crl_sign=issuer is None,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None if issuer else 0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if issuer is not None:
        ends = [Usage.SERVER_AUTH, Usage.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(ends), critical=False)
        alternatives = [_general_name(host) for host in dict.fromkeys(hosts)]
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    return builder.sign(signer, hashes.SHA256()), key


def _general_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not _plain(host.removeprefix("*.")):
        raise UsageError(f"{host[:80]!r} is no host", where="--host", expected="an address, or a name in ASCII")
    return x509.DNSName(host)


def write(folder: Path, ca: x509.Certificate, pair: Pair) -> None:
    """One folder, which is not there yet."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    folder.mkdir(parents=True, mode=0o700)
    (folder / "ca.pem").write_bytes(ca.public_bytes(Encoding.PEM))
    (folder / "cert.pem").write_bytes(pair[0].public_bytes(Encoding.PEM))
    secret = pair[1].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with os.fdopen(os.open(folder / "key.pem", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
