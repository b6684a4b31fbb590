"""A node's folder is read whole or refused in one paragraph that names the file."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path

import pytest

from splitlm.core.errors import UsageError
from splitlm.wire import tls
from tests.link.certificates import folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders() / "good" / "a", tmp_path / "a"))


def test_both_sides_speak_nothing_older_and_ask_for_a_certificate(folder: Path) -> None:
    made = tls.load(folder)
    for context in (made.listening, made.dialling):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert not context.check_hostname
    assert tls.load(folder, check_host=True).dialling.check_hostname


@pytest.mark.parametrize("name", [tls.CA, tls.CERTIFICATE, tls.KEY])
def test_a_missing_file_is_named_with_the_way_to_make_it(name: str, folder: Path) -> None:
    (folder / name).unlink()
    with pytest.raises(UsageError, match=r"(?s)No such file.*splitlm certs") as caught:
        tls.load(folder)
    assert caught.value.where == str(folder / name)


@pytest.mark.parametrize("name", [tls.CA, tls.CERTIFICATE, tls.KEY])
def test_a_file_that_holds_something_else_is_named(name: str, folder: Path) -> None:
    (folder / name).write_text("something else")
    with pytest.raises(UsageError) as caught:
        tls.load(folder)
    assert caught.value.where == str(folder / name)
    assert "\n" not in str(caught.value)


def test_the_key_of_another_certificate(folder: Path) -> None:
    shutil.copy(folders() / "good" / "b" / tls.KEY, folder / tls.KEY)
    with pytest.raises(UsageError, match="The key belongs to another certificate"):
        tls.load(folder)


def test_a_certificate_that_has_expired() -> None:
    with pytest.raises(UsageError, match=r"cert\.pem: The certificate has expired on \d{4}-\d\d-\d\d"):
        tls.load(folders() / "expired" / "a")


def test_a_certificate_of_another_authority(folder: Path) -> None:
    shutil.copy(folders() / "other" / "a" / tls.CA, folder / tls.CA)
    with pytest.raises(UsageError, match=r"cert\.pem: The certificate is not signed by the CA beside it"):
        tls.load(folder)
