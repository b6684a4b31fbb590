"""One private broker for all tests of the bus: it takes some ten seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bus.server import SERVER, Broker
from tests.link.certificates import folders


@pytest.fixture(scope="session")
def rabbit() -> Iterator[Broker]:
    """A running broker; skips where RabbitMQ is not installed."""
    if not SERVER.exists():
        pytest.skip("rabbitmq-server is not installed")
    broker = Broker(folders() / "good" / "b")
    try:
        broker.start()
        yield broker
    finally:
        broker.remove()
