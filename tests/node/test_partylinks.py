"""Where a worker listens and what it tells, and that each link of a party is over TLS when the run is."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from splitlm.core import training
from splitlm.core.config import RunConfig, read
from splitlm.core.errors import NetworkError, PeerRefusedError, UsageError
from splitlm.core.shape import Role
from splitlm.finetune.plane import Neighbour
from splitlm.finetune.recipe import open_recipe
from splitlm.finetune.window import Lane
from splitlm.link import tcp
from splitlm.link.base import StreamChannel
from splitlm.model.tunable import TunableFiles
from splitlm.node.guard import Guard
from splitlm.node.partylinks import LinkSettings, PartyLinks
from splitlm.wire.frame import PROTOCOL
from splitlm.wire.handshake import Claims, Identity
from tests.bus.server import free_port
from tests.link.certificates import folders, good
from tests.tiny_tune import build

HERE = "127.0.0.1"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TunableFiles:
    folder = build("bert", tmp_path_factory.mktemp("links") / "model")
    return open_recipe(read({"server": {"model-path": str(folder)}}, "test"), folder, 4).files


class Plane:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.links: dict[tuple[Neighbour, Lane], StreamChannel] = {}

    @property
    def neighbours(self) -> set[Neighbour]:
        return {
            who for who, lane in self.links if (who, "gradient") in self.links and (who, "activation") in self.links
        }

    def attach(self, who: Neighbour, lane: Lane, channel: Any) -> None:
        self.links[who, lane] = channel


def config(tls: str = "auto") -> RunConfig:
    return read({"security": {"tls": tls, "certs": str(folders() / "good" / "a")}}, "test")


def links(
    files: TunableFiles, role: Role, settings: LinkSettings, made: RunConfig, at: tuple[str, int] = (HERE, 1)
) -> PartyLinks:
    start = training.Start(0, 1, 1, "run", {}, aggregator=at)
    return PartyLinks(settings, files, role, 0, role, start, HERE, made)


@asynccontextmanager
async def aggregator(tls: ssl.SSLContext | None) -> AsyncIterator[int]:
    import splitlm

    claims = Claims(
        node="the aggregator", version=splitlm.__version__, protocol=PROTOCOL, ring="run", role="aggregator"
    )
    door = await tcp.listen(HERE, 0, Identity(claims), "state", tls=tls)
    try:
        yield door.port
    finally:
        await door.close()


@pytest.mark.parametrize("tls", ["on", "off"])
def test_every_link_is_over_tls_or_none(tls: str, files: TunableFiles) -> None:
    async def main() -> None:
        made, secured = config(tls), tls == "on"
        guard = Guard.of(made)
        async with asyncio.timeout(60), aggregator(good("b").listening if secured else None) as port:
            at = (HERE, port)
            worker = links(files, "worker", LinkSettings(guard=guard), made, at)
            owner = links(files, "owner", LinkSettings(guard=guard), made, at)
            planes: list[Any] = [Plane(), Plane()]
            host, activation, gradient = await worker.listen(planes[0])
            assert host == HERE and activation and gradient
            assert await owner.listen(planes[1]) == (HERE, 0, 0)
            peers = training.Peers([0], [training.Peer(0, host, activation, gradient, 1.0)])
            states = await asyncio.gather(worker.meet(planes[0], peers, at), owner.meet(planes[1], peers, at))
            made_links = [*states, *(link for plane in planes for link in plane.links.values())]
            assert len(made_links) == 6
            for link in made_links:
                assert (link._transport.get_extra_info("sslcontext") is not None) == secured  # type: ignore[union-attr]
            await asyncio.gather(*(link.close() for link in made_links))
            await asyncio.gather(worker.close(), owner.close())

    asyncio.run(main())


def test_whoever_dials_a_worker_plainly_or_with_another_authority_hears_why(files: TunableFiles) -> None:
    async def main() -> None:
        made = config("on")
        worker = links(files, "worker", LinkSettings(guard=Guard.of(made)), made)
        plane: Any = Plane()
        _, activation, _ = await worker.listen(plane)
        me = Identity(Claims(node="x", version="1", protocol=PROTOCOL))
        other = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        other.check_hostname = False
        other.load_verify_locations(folders() / "other" / "a" / "ca.pem")
        for context, words in ((None, "does not speak TLS"), (other, "certificate")):
            with pytest.raises(PeerRefusedError, match=words):
                await tcp.connect(HERE, activation, me, "activation", deadline_s=20, who="worker 0", tls=context)
        assert not plane.links
        await worker.close()

    asyncio.run(main())


def test_a_worker_tells_one_host_and_listens_at_another(files: TunableFiles) -> None:
    async def main() -> None:
        made, plane = config("on"), Plane()
        port = free_port()
        settings = LinkSettings(host="worker.example", port=port, bind="127.0.0.2", guard=Guard.of(made))
        worker = links(files, "worker", settings, made)
        ports: Any = await worker.listen(plane)  # type: ignore[arg-type]
        assert ports == ("worker.example", port, port + 1)
        assert [(door.host, door.port) for door in worker._doors] == [("127.0.0.2", port), ("127.0.0.2", port + 1)]
        await worker.close()
        lone = links(files, "worker", LinkSettings(host="127.0.0.3", guard=Guard.of(made)), made)
        assert (await lone.listen(plane))[0] == "127.0.0.3"  # type: ignore[arg-type]
        assert {door.host for door in lone._doors} == {"127.0.0.3"}
        await lone.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("run", "host", "certs", "error"),
    [
        ("off", "10.91.7.2", True, PeerRefusedError),  # this one sees another machine, and the coordinator did not
        ("auto", "10.91.7.2", False, UsageError),
        ("on", "", False, UsageError),
    ],
)
def test_a_party_that_cannot_be_safe_does_not_listen(
    run: str, host: str, certs: bool, error: type[Exception], files: TunableFiles
) -> None:
    made = read({"security": {"tls": run} | ({"certs": str(folders() / "good" / "a")} if certs else {})}, "test")
    party = links(files, "worker", LinkSettings(host=host, guard=Guard()), made)
    with pytest.raises(error, match="splitlm certs"):
        asyncio.run(party.listen(Plane()))  # type: ignore[arg-type]


def test_no_plain_link_leaves_the_machine_though_the_worker_told_its_host_late(files: TunableFiles) -> None:
    async def main() -> None:
        made = config("off")
        owner = links(files, "owner", LinkSettings(guard=Guard()), made)
        plane: Any = Plane()
        await owner.listen(plane)
        with pytest.raises(NetworkError, match=r"10\.91\.7\.2.*another machine"):
            await owner.meet(plane, training.Peers([0], [training.Peer(0, "10.91.7.2", 1, 2, 1.0)]), (HERE, 1))
        await owner.close()

    asyncio.run(main())
