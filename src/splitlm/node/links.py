"""How a node is linked: a way in and a way out for tokens, and one channel to each neighbour for blocks that move."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from splitlm.core.cut import Cut
from splitlm.core.errors import SplitlmError
from splitlm.core.groups import first_error
from splitlm.core.messages import Assign, Connect
from splitlm.link import tcp
from splitlm.node.members import Members
from splitlm.node.settings import RingSettings
from splitlm.wire.channel import Channel, Listener
from splitlm.wire.handshake import Identity
from splitlm.wire.tls import Security


@dataclass(frozen=True)
class Links:
    """A node's links; ``movers`` by the node at their other end."""

    inbound: Channel
    outbound: Channel
    movers: dict[int, Channel]


async def link_stage(
    assign: Assign,
    identity: Identity,
    *,
    listen: tuple[str, int],
    send: tuple[str, int] | None,
    deadline_s: float,
    tls: Security | None,
    opened: Callable[[int, int], Awaitable[None]],
    told: Callable[[], Awaitable[Connect]],
    keep: Callable[[Channel | Listener], None],
) -> Links:
    """Listen for the previous node and connect to the next one, in whichever order they come.

    Args:
        listen: where the previous node is to reach this one.
        send: the next node's address, where it is fixed.
        tls: this node's certificate; None leaves the links plain.
        opened: told the data and the move port once both listen.
        told: waits for the head's word on where the next node is. Before it nobody dials.
        keep: takes each link as soon as it is made, to be closed whatever happens; and the data port, which stays open
            as long: a node that was wired wrongly, and comes late, is to hear where it is.

    Raises:
        NetworkError: a neighbour did not come in time, or is not who it must be.
    """
    here, after, before = assign.node, assign.cut.next_node(assign.node), f"node {assign.node - 1}"
    who = f"node {after}" if after else "the head"
    previous, following = identity.awaiting(here - 1), identity.awaiting(after)
    inward, outward = (tls.listening, tls.dialling) if tls else (None, None)
    listener = await tcp.listen(*listen, previous, "data", expect_peer=before, tls=inward)
    keep(listener)
    movers = None

    def kept(link: Channel) -> Channel:
        keep(link)
        return link

    async def answer(door: tcp.TcpListener) -> Channel:
        await told()
        return kept(await door.accept(deadline_s=deadline_s, who=before))

    async def dial() -> Channel:
        word = await told()
        host, port = send or (word.host, word.port)
        return kept(await tcp.connect(host, port, following, "data", deadline_s=deadline_s, who=who, tls=outward))

    async def dial_mover() -> Channel | None:
        word = await told()
        if not word.move_port:
            return None  # the head: it has dialled node 1 for moves, and takes none from the last node
        place = (send[0] if send else word.host, word.move_port)
        return kept(await tcp.connect(*place, following, "move", deadline_s=deadline_s, who=who, tls=outward))

    try:
        movers = await tcp.listen(listen[0], 0, previous, "move", expect_peer=before, tls=inward)
        await opened(listener.port, movers.port)
        async with asyncio.TaskGroup() as group:
            inbound, outbound = group.create_task(answer(listener)), group.create_task(dial())
            down, up = group.create_task(answer(movers)), group.create_task(dial_mover())
        neighbours = {here - 1: down.result()}
        if (above := up.result()) is not None:
            neighbours[after] = above
        return Links(inbound.result(), outbound.result(), neighbours)
    except* SplitlmError as errors:
        raise first_error(errors) from None
    finally:
        if movers is not None:
            await movers.close()


async def link_head(
    members: Members,
    settings: RingSettings,
    cut: Cut,
    identity: Identity,
    tls: Security | None,
    say: Callable[[str], None],
    keep: Callable[[Channel], None],
) -> Links:
    """Once everyone has loaded: tell each where to send, connect to node 1, let the last node in.

    Raises:
        NetworkError: a node did not come in time, or is not who it must be.
    """
    last, deadline = f"node {cut.stages - 1}", settings.deadline_s
    host = settings.data[0] or settings.listen[0]
    inward, outward = (tls.listening, tls.dialling) if tls else (None, None)
    awaited = identity.awaiting(cut.stages - 1)
    door = await tcp.listen(host, settings.data[1], awaited, "data", expect_peer=last, tls=inward)
    following = identity.awaiting(1)

    def kept(link: Channel) -> Channel:
        keep(link)
        return link

    try:
        await members.all_loaded()
        say("linking")
        await members.introduce(door.port)
        first = members.placed[0]
        to = settings.send if settings.send[1] else members.address(first)
        move_port = first.loaded.move_port if first.loaded else 0

        async def dial() -> Channel:
            return kept(await tcp.connect(*to, following, "data", deadline_s=deadline, who="node 1", tls=outward))

        async def dial_mover() -> Channel:
            place = (to[0], move_port)
            return kept(await tcp.connect(*place, following, "move", deadline_s=deadline, who="node 1", tls=outward))

        async def answer() -> Channel:
            return kept(await door.accept(deadline_s=deadline, who=last))

        async with asyncio.TaskGroup() as group:
            inbound, outbound = group.create_task(answer()), group.create_task(dial())
            mover = group.create_task(dial_mover())
        await members.all_ready()
        return Links(inbound.result(), outbound.result(), {1: mover.result()})
    except* SplitlmError as errors:
        raise first_error(errors) from None
    finally:
        await door.close()
