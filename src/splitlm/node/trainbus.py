"""The control plane of a training, as its settings choose it: the coordinator's own star, or a RabbitMQ broker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from splitlm.bus.address import Address
from splitlm.bus.base import Hub
from splitlm.bus.rabbitmq import RabbitHub, RabbitSpoke
from splitlm.bus.star import StarHub, StarSpoke
from splitlm.core.config import RunConfig
from splitlm.core.errors import NetworkError
from splitlm.link import tcp
from splitlm.link.local import facing, loopback
from splitlm.node.guard import Guard
from splitlm.node.identity import stranger
from splitlm.node.ways import broker_address
from splitlm.wire.handshake import Identity

CTRL_TIMEOUT_S = 10.0
"""Who says nothing for so long is lost; everyone says something every third of it."""
_log = logging.getLogger("splitlm.train")


async def open_star(
    name: str, listen: tuple[str, int], token: str, guard: Guard, tls: bool, opened: Callable[[int], None]
) -> Hub:
    """The star's hub at an address.

    Args:
        name: what the coordinator calls itself.
        listen: address of the control port; port 0 takes a free one.
        token: join secret.
        guard: this machine's security.
        tls: whether lines are over TLS.
        opened: told the port.

    Raises:
        UsageError: there is no certificate, or it is no good.
        NetworkError: the address cannot be listened on.
    """
    security = guard.load(tls)
    listener = await tcp.listen(
        *listen,
        Identity(stranger(name), token),
        "control",
        expect_peer="a party",
        tls=security.listening if security else None,
    )
    hub = StarHub(listener, heartbeat_s=CTRL_TIMEOUT_S / 3, timeout_s=CTRL_TIMEOUT_S)
    opened(listener.port)
    return hub


async def open_rabbit(config: RunConfig, advertise: str) -> RabbitHub:
    """The broker's hub of the run ``config.name``.

    Args:
        advertise: what parties are to call this machine; empty for its address on the way to the broker.

    Raises:
        UsageError: the certificates for the broker are no good.
        NetworkError: the broker is not there, does not let us in, or has a run of this name.
    """
    where = broker_address(config)
    _caution(where)
    host = advertise or await asyncio.to_thread(facing, where.host)
    return await RabbitHub.open(where, config.name, host, heartbeat_s=CTRL_TIMEOUT_S / 3, timeout_s=CTRL_TIMEOUT_S)


async def join_star(
    name: str, at: tuple[str, int], host: str, token: str, guard: Guard, deadline_s: float
) -> StarSpoke:
    """A party's line to a coordinator that listens.

    Args:
        name: what the party calls itself.
        at: the coordinator's address.
        host: at which others reach this party, where it is said.
        token: join secret.
        guard: this machine's security.
        deadline_s: how long to wait for the coordinator.

    Raises:
        UsageError: there is no certificate, or it is no good.
        NetworkError: the coordinator did not come, or the two sides do not agree.
    """
    security = guard.load(guard.wanted(at[0], host))
    channel = await tcp.connect(
        *at,
        Identity(stranger(name), token),
        "control",
        deadline_s=deadline_s,
        who="the coordinator",
        tls=security.dialling if security else None,
    )
    return StarSpoke(channel, heartbeat_s=CTRL_TIMEOUT_S / 3, timeout_s=CTRL_TIMEOUT_S)


async def join_rabbit(config: RunConfig, name: str, host: str, deadline_s: float) -> RabbitSpoke:
    """A party's way to the coordinator of the run ``config.name`` through the broker.

    Args:
        config: of the run, with this machine's own ``rabbit`` and ``security.certs``.
        name: what the party calls itself.
        host: what others are to call this machine; empty for its address on the way to the broker.
        deadline_s: how long to wait for the coordinator.

    Raises:
        UsageError: the certificates for the broker are no good.
        NetworkError: the broker is not there or does not let us in, or the coordinator did not come, or calls itself
            what only its own machine can reach.
    """
    where = broker_address(config)
    _caution(where)
    host = host or await asyncio.to_thread(facing, where.host)
    spoke = await RabbitSpoke.open(
        where,
        config.name,
        name,
        host,
        deadline_s=deadline_s,
        heartbeat_s=CTRL_TIMEOUT_S / 3,
        timeout_s=CTRL_TIMEOUT_S,
    )
    if loopback(spoke.hub_host) and not loopback(host):
        await spoke.close()
        raise NetworkError(
            f"The coordinator calls itself {spoke.hub_host}, where only its own machine reaches it",
            where=str(where),
            expected="an address that this machine can reach",
            remedy="Start the coordinator with --advertise and its network address",
        )
    return spoke


def _caution(where: Address) -> None:
    if where.tls is None and not loopback(where.host):
        _log.warning("The way to the broker at %s is not encrypted, and the password goes it: set rabbit.tls", where)
