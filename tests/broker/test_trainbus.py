"""How coordinator and parties find each other at a broker: by the run's name, and by an address both can reach."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from pathlib import Path

import pytest

from splitlm.core.config import RunConfig, read
from splitlm.core.errors import AddressBusyError, NetworkError
from splitlm.node.trainbus import join_rabbit, open_rabbit
from tests.bus.server import Broker, free_port
from tests.cli.command import run

AWAY = "10.91.7.1"


def config(broker: Broker) -> RunConfig:
    return read({"name": f"t{secrets.token_hex(4)}", "rabbit": {"port": broker.port}}, "test")


def test_a_party_learns_the_address_that_the_coordinator_tells(rabbit: Broker) -> None:
    async def main() -> None:
        made = config(rabbit)
        hub = await open_rabbit(made, AWAY)
        spoke = await join_rabbit(made, "worker x:1", "10.91.7.2", 20)
        assert spoke.hub_host == AWAY
        await spoke.close()
        with pytest.raises(AddressBusyError, match="name"):
            await open_rabbit(made, "")
        await hub.close()

    asyncio.run(main())


def test_a_coordinator_that_calls_itself_loopback_is_of_no_use_elsewhere(rabbit: Broker) -> None:
    async def main() -> None:
        made = config(rabbit)
        hub = await open_rabbit(made, "")
        assert hub.host == "127.0.0.1"
        with pytest.raises(NetworkError, match="--advertise"):
            await join_rabbit(made, "worker x:1", "10.91.7.2", 20)
        near = await join_rabbit(made, "worker x:2", "", 20)
        await asyncio.gather(near.close(), hub.close())

    asyncio.run(main())


def test_a_plain_way_to_a_broker_elsewhere_is_warned_of_without_the_password(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitlm.bus.address.CONNECT_S", 0.2)
    rabbit = {"address": "127.0.0.1", "port": free_port(), "password": "of-ours"}
    with caplog.at_level(logging.WARNING):
        with pytest.raises(NetworkError):
            asyncio.run(join_rabbit(read({"rabbit": rabbit}, "test"), "x", "", 5))
        assert "rabbit.tls" not in caplog.text
        with pytest.raises(NetworkError) as caught:
            asyncio.run(join_rabbit(read({"rabbit": rabbit | {"address": "192.0.2.1"}}, "test"), "x", "", 5))
    assert "rabbit.tls" in caplog.text
    assert "of-ours" not in caplog.text + str(caught.value)


def test_join_is_for_the_star_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"rabbit": {"port": 1}}))
    done = run("client", path, "--join", "127.0.0.1:7000")
    assert done.code == 2 and "server.bus: star" in done.paragraph
    done = run("client", path, "--set", "server.bus=star")
    assert done.code == 2 and "--join" in done.paragraph
