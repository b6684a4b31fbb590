"""Which links are over TLS: what each machine's user says, and what the run says."""

from __future__ import annotations

import logging
import ssl

import pytest

from splitlm.core.config import read
from splitlm.core.errors import PeerRefusedError, UsageError
from splitlm.link.local import facing, loopback
from splitlm.node.guard import Guard, Mode
from splitlm.node.ways import Direct, open_way
from tests.link.certificates import folders

HERE, AWAY = "127.0.0.1", "10.91.7.2"


@pytest.mark.parametrize(
    ("host", "near"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True), ("localhost", True),
     ("", True), ("memory", True), ("0.0.0.0", False), ("10.0.0.1", False), ("::", False), ("worker", False)],
)  # fmt: skip
def test_what_is_this_machines_own(host: str, near: bool) -> None:
    assert loopback(host) == near


def test_the_way_to_an_address_of_ours_is_that_address() -> None:
    assert [facing(host) for host in ("127.0.0.1", "memory", "no host.")] == [HERE] * 3


@pytest.mark.parametrize(
    ("mode", "hosts", "wanted", "warned"),
    [
        ("auto", (HERE, ""), False, False),
        ("auto", (HERE, AWAY), True, False),
        ("on", (HERE,), True, False),
        ("off", (HERE,), False, False),
        ("off", (HERE, AWAY), False, True),
    ],
)
def test_on_by_itself_once_one_end_is_elsewhere_and_off_with_a_warning(
    mode: Mode, hosts: tuple[str, ...], wanted: bool, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert Guard(mode).wanted(*hosts) == wanted
    assert [AWAY in record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == (
        [True] if warned else []
    )


@pytest.mark.parametrize(
    ("mine", "run", "host", "agreed"),
    [
        ("auto", "auto", HERE, False),
        ("auto", "auto", AWAY, True),
        ("auto", "on", HERE, True),  # the others are further away
        ("auto", "on", AWAY, True),
        ("auto", "off", HERE, False),
        ("auto", "off", AWAY, None),  # nobody is talked out of TLS
        ("on", "on", HERE, True),
        ("on", "off", HERE, None),
        ("off", "off", AWAY, False),
        ("off", "on", HERE, None),
    ],
)
def test_a_party_goes_along_unless_its_user_asked_for_the_opposite(
    mine: Mode, run: Mode, host: str, agreed: bool | None
) -> None:
    if agreed is not None:
        assert Guard(mine).agreed(run, host) == agreed
        return
    with pytest.raises(PeerRefusedError, match=rf"security\.tls is {mine}") as caught:
        Guard(mine).agreed(run, host)
    assert "security.tls: on everywhere" in str(caught.value)


def test_without_certificates_it_is_said_how_they_are_made() -> None:
    with pytest.raises(UsageError, match="splitlm certs") as caught:
        Guard("on").load(True)
    assert caught.value.where == "security.certs"
    assert Guard("on").load(False) is None
    security = Guard("on", folders() / "good" / "a").load(True)
    assert security is not None and not security.dialling.check_hostname


def test_a_broker_shows_its_host_name_and_is_known_by_the_system_where_there_is_no_folder() -> None:
    assert Guard().broker(False) is None
    own, public = Guard("auto", folders() / "good" / "a").broker(True), Guard().broker(True)
    assert own is not None and own.check_hostname and own.minimum_version == ssl.TLSVersion.TLSv1_3
    assert public is not None and public.check_hostname and public.verify_mode == ssl.CERT_REQUIRED


def test_tensors_go_through_no_plain_broker_elsewhere() -> None:
    import asyncio

    made = read({"rabbit": {"address": AWAY}, "learning": {"u-shape": {"transport": "rabbitmq"}}}, "test")
    with pytest.raises(UsageError, match=r"rabbit\.tls"):
        asyncio.run(open_way(made, "r", tls=True))
    assert isinstance(asyncio.run(open_way(read({}, "test"), "r", tls=False)), Direct)
