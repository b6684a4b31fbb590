"""``splitlm certs``: what it makes can be used, is private, and is not overwritten unasked; and what --tls warns of."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from cryptography import x509

from splitlm.cli.certs import tls_folder
from splitlm.wire import tls

from .command import run


def test_each_node_gets_a_folder_that_works_and_the_keys_are_private(tmp_path: Path) -> None:
    done = run("certs", tmp_path, "--name", "alpha", "--name", "beta", "--host", "10.1.2.3", "--host", "broker.local")
    assert done.code == 0, done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alpha", "authority", "beta"]
    for name in ("alpha", "beta", "authority"):
        assert stat.S_IMODE((tmp_path / name / "key.pem").stat().st_mode) == 0o600
        assert str(tmp_path / name) in done.out
    authority = (tmp_path / "authority" / "key.pem").read_bytes()
    for name in ("alpha", "beta"):
        tls.load(tmp_path / name)
        assert all(path.read_bytes() != authority for path in (tmp_path / name).iterdir())
        names = x509.load_pem_x509_certificate((tmp_path / name / "cert.pem").read_bytes()).extensions
        hosts = names.get_extension_for_class(x509.SubjectAlternativeName).value
        assert {name, "localhost", "broker.local"} == set(hosts.get_values_for_type(x509.DNSName))
        assert {"127.0.0.1", "::1", "10.1.2.3"} == set(map(str, hosts.get_values_for_type(x509.IPAddress)))


def test_what_is_there_is_replaced_only_by_force(tmp_path: Path) -> None:
    assert run("certs", tmp_path, "--name", "a").code == 0
    before = (tmp_path / "a" / "cert.pem").read_bytes()
    other = tmp_path / "a" / "note.txt"
    other.write_text("mine")
    done = run("certs", tmp_path, "--name", "a")
    assert done.code == 2 and "--force" in done.paragraph
    assert (tmp_path / "a" / "cert.pem").read_bytes() == before
    assert run("certs", tmp_path, "--name", "a", "--force").code == 0
    assert (tmp_path / "a" / "cert.pem").read_bytes() != before
    assert other.read_text() == "mine"
    tls.load(tmp_path / "a")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("--name", "../up"), "--name"),
        (("--name", "authority"), "--name"),
        (("--name", "good", "--name", "n" * 300), "--name"),
        (("--name", "good", "--name", "ñode"), "--name"),
        (("--name", "good", "--name", ""), "--name"),
        (("--host", "a b"), "--host"),
        (("--host", ""), "--host"),
        (("--days", "999999999"), "--days"),
        (("--days", "0"), "--days"),
        (("--host", "häuser"), "--host"),
    ],
)
def test_what_cannot_be_made_is_said(words: tuple[str, ...], option: str, tmp_path: Path) -> None:
    done = run("certs", tmp_path / "new", *words)
    assert done.code == 2 and option in done.paragraph
    assert not (tmp_path / "new").exists() and not (tmp_path / "up").exists()


def refuse_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last file that is put in place finds the disk full."""
    rename = Path.rename

    def refused(self: Path, target: Path) -> Path:
        if Path(target).parent.name == "b" and target.name == "key.pem":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refused)


def test_what_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_the_last(monkeypatch)
    done = run("certs", tmp_path / "new" / "deep", "--name", "a", "--name", "b")
    assert done.code == 2 and "No space left" in done.paragraph
    assert list(tmp_path.iterdir()) == []


def test_what_fails_half_way_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("certs", tmp_path, "--name", "a").code == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.pem")}
    refuse_the_last(monkeypatch)
    assert run("certs", tmp_path, "--name", "a", "--name", "b", "--force").code == 2
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.pem")} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "authority"]


def test_a_folder_whose_name_is_too_long_is_said(tmp_path: Path) -> None:
    done = run("certs", tmp_path / "new" / ("d" * 300))
    assert done.code == 2 and "too long" in done.paragraph
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_good_ends_a_verb_with_one_paragraph(tmp_path: Path) -> None:
    done = run("stage", "--join", "127.0.0.1:1", "--no-trace", "--tls", tmp_path)
    assert done.code == 2 and "ca.pem" in done.paragraph and "splitlm certs" in done.paragraph


@pytest.mark.parametrize(
    ("text", "host", "warns"),
    [
        ("", "127.0.0.1", 0),
        ("", "localhost", 0),
        ("", "::1", 0),
        ("", "10.0.0.1", 1),
        ("", "0.0.0.0", 1),
        ("off", "10.0.0.1", 1),
        ("off", "127.0.0.1", 0),
        ("some", "10.0.0.1", 0),
    ],
)
def test_what_leaves_this_machine_in_the_clear_is_warned_of_once(
    text: str, host: str, warns: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert tls_folder(text, (host, 1), (host, 2)) == (text if text == "some" else None)
    assert len(caplog.records) == warns
    if warns:
        words = caplog.records[0].getMessage()
        assert host in words and "not encrypted" in words
        assert ("splitlm certs" in words) is (text == "")
