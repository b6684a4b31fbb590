"""Certificates for tests: good ones, and each way in which one can be wrong."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from splitlm.cli import certs
from splitlm.wire import tls

HOSTS = ["localhost", "127.0.0.1"]


@cache
def folders() -> Path:
    """``good/a`` and ``good/b`` of one authority, ``other/a`` of another, ``expired/a`` of the first, but of old."""
    base = Path(mkdtemp(prefix="certs-"))
    ca = certs.signed("splitlm authority", 2, None, [])
    for name in ("a", "b"):
        certs.write(base / "good" / name, ca[0], certs.signed(name, 2, ca, [name, *HOSTS]))
    old = datetime.now(UTC) - timedelta(days=9)
    certs.write(base / "expired" / "a", ca[0], certs.signed("a", 2, ca, HOSTS, old))
    certs.make(base / "other", ["a"], HOSTS, 2)
    return base


def good(name: str = "a") -> tls.Security:
    return tls.load(folders() / "good" / name)


def unchecked(name: str, protocol: int, trust: str = "good/b") -> ssl.SSLContext:
    """A context that ``load`` would not make: with a certificate that is of no use."""
    context = ssl.SSLContext(protocol)
    context.load_cert_chain(folders() / name / tls.CERTIFICATE, folders() / name / tls.KEY)
    context.load_verify_locations(folders() / trust / tls.CA)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    return context
