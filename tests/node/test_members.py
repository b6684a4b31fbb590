"""The stages as the head knows them, over a hub in memory: places, progress, and every way to leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from splitlm.bus.memory import MemoryHub, MemorySpoke
from splitlm.core.cut import Cut, make_cut
from splitlm.core.errors import (
    CutError,
    ModelError,
    NetworkError,
    PeerLostError,
    PeerMissingError,
    ProtocolError,
    SplitlmError,
)
from splitlm.core.messages import Assign, Connect, Join, Loaded, Message, Ready, Report, Stop, Trouble
from splitlm.node.members import Members, _is_loopback
from splitlm.node.settings import RingSettings

CUT = make_cut(6, (2, 4))
LOADED = Loaded("", 4001, 10, 40)
REPORT = Report(1, 2, 3, 4.0, 5.0, 6.0)
ASSIGNED = {"model": "m", "folder": Path("m"), "deadline_s": 5.0}


class Scene:
    """A head's members with the hub below them; ``watch`` runs while the story does."""

    def __init__(self, **settings: object) -> None:
        self.hub = MemoryHub()
        self.said: list[str] = []
        self.settings = RingSettings(**{**ASSIGNED, **settings})  # type: ignore[arg-type]
        self.members = Members(self.hub, self.settings, self.said.append)

    async def come(
        self, name: str, begin: int | None = None, end: int | None = None, host: str = "10.0.0.1"
    ) -> MemorySpoke:
        spoke = self.hub.join(name, host)
        await spoke.send(Join(name, begin, end))
        return spoke

    async def form(self, count: int = 2) -> list[MemorySpoke]:
        """A ring of so many stages that have their places."""
        spokes = [await self.come(f"stage host:{i}") for i in range(1, count + 1)]
        await self.members.gather(CUT, 6)
        await self.members.assign(CUT, "float32", "ring")
        for spoke in spokes:
            assert isinstance(await spoke.receive(), Assign)
        return spokes

    async def settle(self, true: Callable[[], bool]) -> None:
        while not true():
            await asyncio.sleep(0)


def play(story: Callable[[Scene], Awaitable[None]], **settings: object) -> Scene:
    """Run a story beside ``watch``; the first error of either is raised."""

    async def main() -> Scene:
        scene = Scene(**settings)
        watch = asyncio.create_task(scene.members.watch())
        told = asyncio.create_task(story(scene))  # type: ignore[arg-type]
        async with asyncio.timeout(20):
            done, rest = await asyncio.wait({watch, told}, return_when=asyncio.FIRST_COMPLETED)
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
        for task in done:
            task.result()
        return scene

    return asyncio.run(main())


def test_a_stage_lost_while_others_are_turned_away_is_missed() -> None:
    """It had its place by then: nobody may wait for it, or link past it."""

    async def story(scene: Scene) -> None:
        spokes = [await scene.come(f"stage host:{i}") for i in range(1, 4)]
        await scene.settle(lambda: len(scene.members._members) == 3)
        send = scene.hub.send

        async def slow(peer: str, message: Message) -> None:
            spokes[0].vanish("killed")
            for _ in range(20):
                await asyncio.sleep(0)
            await send(peer, message)

        scene.hub.send = slow  # type: ignore[method-assign]
        await scene.members.gather(CUT, 6)
        await asyncio.sleep(5)

    with pytest.raises(PeerLostError, match=r"Node 1 .*killed"):
        play(story)


def test_places_are_given_in_the_order_of_arrival_and_each_is_told_its_own() -> None:
    async def story(scene: Scene) -> None:
        gathered = asyncio.create_task(scene.members.gather(CUT, 6))
        one, two = await scene.come("stage b:2"), await scene.come("stage a:1")
        assert await gathered == CUT
        await scene.members.assign(CUT, "float16", "r7")
        for number, spoke in ((1, one), (2, two)):
            told = await spoke.receive()
            assert isinstance(told, Assign)
            assert (told.node, told.cut, told.dtype, told.ring, told.model) == (number, CUT, "float16", "r7", "m")
        assert [m.join.name for m in scene.members.placed] == ["stage b:2", "stage a:1"]

    play(story)


def test_each_is_told_where_the_next_one_listens_and_the_last_the_heads_port() -> None:
    async def story(scene: Scene) -> None:
        one, two = await scene.form()
        waiting = asyncio.create_task(scene.members.all_loaded())
        await one.send(LOADED)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await two.send(Loaded("named.example", 4002, 1, 1))
        await waiting
        await scene.members.introduce(5000)
        assert await one.receive() == Connect("named.example", 4002)
        assert await two.receive() == Connect("", 5000)
        assert scene.members.address(scene.members.placed[0]) == ("10.0.0.1", 4001)
        ready = asyncio.create_task(scene.members.all_ready())
        await one.send(Ready())
        await asyncio.sleep(0.01)
        assert not ready.done()
        await two.send(Ready())
        await ready

    play(story)


def test_a_stage_that_only_this_machine_can_reach_is_named_before_another_machine_tries() -> None:
    async def story(scene: Scene) -> None:
        near = await scene.come("near", host="127.0.0.1")
        far = await scene.come("far", host="10.0.0.9")
        await scene.members.gather(CUT, 6)
        await near.send(LOADED)
        await far.send(LOADED)
        await scene.members.all_loaded()
        first, second = scene.members.placed
        assert scene.members.address(second, first)[0] == "10.0.0.9"
        with pytest.raises(NetworkError, match=r"near.*joined over 127.0.0.1.*far.*--advertise"):
            scene.members.address(first, second)

    play(story)


def test_a_user_who_fixed_the_places_named_the_addresses_too() -> None:
    """What the head saw of a stage may be another address (a tunnel), and nobody uses it."""

    async def story(scene: Scene) -> None:
        far = await scene.come("far", 2, 4, host="10.0.0.9")
        near = await scene.come("near", 4, 6, host="127.0.0.1")
        await scene.members.gather(None, 6)
        for stage in (far, near):
            await stage.send(LOADED)
        await scene.members.all_loaded()
        await scene.members.introduce(5000)
        assert [await stage.receive() for stage in (far, near)] == [Connect("127.0.0.1", 4001), Connect("", 5000)]

    play(story, static=2)


@pytest.mark.parametrize(
    ("host", "near"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("memory", True),
        ("::ffff:10.0.0.9", False),
        ("10.0.0.9", False),
        ("fe80::1", False),
        ("stage.example", False),
    ],
)
def test_addresses_of_this_machine_alone(host: str, near: bool) -> None:
    assert _is_loopback(host) == near


def test_too_few_stages_are_counted_when_the_deadline_has_passed() -> None:
    async def story(scene: Scene) -> None:
        await scene.come("stage a:1")
        await scene.members.gather(CUT, 6)

    with pytest.raises(PeerMissingError, match=r"waited 0.1 s for 2 stages; 1 came.*--deadline") as caught:
        play(story, deadline_s=0.1, listen=("10.0.0.1", 7000))
    assert caught.value.where == "10.0.0.1:7000"


def test_a_stage_that_leaves_before_it_has_a_place_makes_room_for_another() -> None:
    async def story(scene: Scene) -> None:
        gathered = asyncio.create_task(scene.members.gather(CUT, 6))
        gone, upset = await scene.come("gone:1"), await scene.come("upset:1", host="memory")
        await gone.close()
        await upset.send(Trouble(4, "no disk"))
        await scene.settle(lambda: any("upset" in line for line in scene.said))
        assert not gathered.done()
        await scene.come("b:2")
        await scene.come("c:3")
        await gathered
        assert [m.join.name for m in scene.members.placed] == ["b:2", "c:3"]

    scene = play(story)
    assert any("gone:1 left" in line for line in scene.said)


@pytest.mark.parametrize("late", [False, True])
def test_a_stage_too_many_is_turned_away_and_its_answer_disturbs_nobody(late: bool) -> None:
    async def story(scene: Scene) -> None:
        spokes = [await scene.come(f"s:{i}") for i in range(2 if late else 3)]
        await scene.settle(lambda: len(scene.members._members) == len(spokes))
        await scene.members.gather(CUT, 6)
        extra = await scene.come("s:9") if late else spokes[2]
        told = await extra.receive()
        assert isinstance(told, Trouble)
        assert told.code == 3
        assert "complete" in told.text
        await extra.send(Trouble(3, "The head gave up"))
        await extra.close()
        for spoke in spokes[:2]:
            await spoke.send(LOADED)
        await scene.members.all_loaded()

    play(story)


@pytest.mark.parametrize(("code", "kind"), [(4, ModelError), (3, NetworkError), (1, SplitlmError)])
def test_a_stages_reason_ends_the_ring_with_its_class_and_its_name(code: int, kind: type[SplitlmError]) -> None:
    async def story(scene: Scene) -> None:
        _, two = await scene.form()
        await two.send(Trouble(code, "x/model.safetensors: It is missing."))
        await asyncio.Event().wait()

    with pytest.raises(
        kind, match=r"Node 2 \(stage host:2\) stopped: x/model\.safetensors: It is missing\.$"
    ) as caught:
        play(story)
    assert caught.value.exit_code == code


def test_a_stage_that_goes_is_named_with_what_is_known_of_its_end() -> None:
    async def silent(scene: Scene) -> None:
        one, _ = await scene.form()
        one.vanish("The peer was silent for 10 s", 10.0)
        await asyncio.Event().wait()

    with pytest.raises(PeerLostError, match=r"Node 1 \(stage host:1\) is gone: The peer was silent for 10 s"):
        play(silent)

    async def killed(scene: Scene) -> None:
        async def fate(name: str) -> str:
            return f"was ended by SIGKILL ({name})"

        scene.members._fate = fate
        await silent(scene)

    with pytest.raises(PeerLostError, match=r"is gone: its process was ended by SIGKILL \(stage host:1\)"):
        play(killed)


@pytest.mark.parametrize(
    "message", [Join("again"), Ready(), REPORT, Stop(), Connect("", 1), LOADED], ids=lambda m: type(m).__name__
)
def test_a_message_out_of_turn_ends_the_ring_and_names_the_stage(message: Message) -> None:
    async def story(scene: Scene) -> None:
        one, _ = await scene.form()
        if isinstance(message, Loaded):
            await one.send(message)
        await one.send(message)
        await asyncio.Event().wait()

    with pytest.raises(ProtocolError, match=rf"Node 1 .* sent a {type(message).__name__} message out of turn"):
        play(story)


def test_a_peer_that_never_joined_may_say_nothing_and_harms_nobody() -> None:
    async def story(scene: Scene) -> None:
        odd = scene.hub.join("odd", "memory")
        await odd.send(LOADED)
        with pytest.raises(PeerLostError):
            await odd.receive()
        await scene.form()

    play(story)


# Places that stages bring.


@pytest.mark.parametrize(
    ("static", "places", "private", "tail", "boundaries"),
    [
        (2, [(2, 4), (4, -1)], False, 0, (2, 4)),
        (2, [(4, 6), (2, 4)], False, 0, (2, 4)),
        (1, [(1, -1)], False, 0, (1,)),
        (2, [(4, 6), (2, 4)], True, 0, (2, 4, 6)),
        (0, [(3, -1), (0, 3)], True, 1, (0, 3, 5)),
    ],
)
def test_places_make_a_cut_in_whatever_order_they_come(
    static: int, places: list[tuple[int, int]], private: bool, tail: int, boundaries: tuple[int, ...]
) -> None:
    async def story(scene: Scene) -> None:
        gathered = asyncio.create_task(scene.members.gather(None, 6))
        for i, place in enumerate(places):
            await asyncio.sleep(0.01)
            assert not gathered.done()
            await scene.come(f"s:{i}", *place)
        cut: Cut = await gathered
        assert (cut.boundaries, cut.private) == (boundaries, private)
        assert [m.join.begin for m in scene.members.placed] == sorted(begin for begin, _ in places)

    play(story, static=static, private=private, tail_blocks=tail)


@pytest.mark.parametrize(
    ("static", "places", "says"),
    [
        (2, [(3, -1)], r"nobody holds block 2"),
        (2, [(2, 3), (4, 6)], r"nobody holds block 3"),
        (2, [(2, 4)], r"\[2, 4\).*nobody holds block 4"),
        (2, [(1, 4)], r"holds blocks from 1, which the head holds already.*Expected 2"),
        (2, [(2, 5), (4, 6)], r"holds blocks from 4, which \S+.* holds already.*Expected 5"),
        (2, [(2, 7)], r"\[2, 7\).*below 6"),
        (2, [(4, 4)], r"\[4, 4\)"),
        (6, [], r"The head's own place ends at block 6"),
        (7, [], r"The head's own place ends at block 7"),
        (2, [(None, None)], r"without a fixed place"),
    ],
)
def test_places_that_make_no_cut_are_named(static: int, places: list[tuple[int, int]], says: str) -> None:
    async def story(scene: Scene) -> None:
        for i, place in enumerate(places):
            await scene.come(f"s:{i}", *place)
        await scene.members.gather(None, 6)

    with pytest.raises(CutError, match=says):
        play(story, static=static, deadline_s=0.1)


def test_a_fixed_place_where_the_head_gives_the_places_is_refused() -> None:
    async def story(scene: Scene) -> None:
        await scene.come("s:1", 2, 4)
        await scene.come("s:2")
        await scene.members.gather(CUT, 6)

    with pytest.raises(CutError, match="the head gives the places"):
        play(story)


# The end.


def dismissed(ended: SplitlmError | None, answer: Message | None) -> tuple[set[str], list[Message], Scene]:
    """Two stages are told to stop; the first answers in time, the second as given, or never."""
    heard: list[Message] = []

    async def main() -> tuple[set[str], Scene]:
        scene = Scene()
        watch = asyncio.create_task(scene.members.watch())
        one, two = await scene.form()
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)

        async def stage(spoke: MemorySpoke, last: Message | None) -> None:
            heard.append(await spoke.receive())
            if last is not None:
                await spoke.send(last)

        async with asyncio.timeout(10):
            names, *_ = await asyncio.gather(scene.members.dismiss(0.2, ended), stage(one, REPORT), stage(two, answer))
        return names, scene

    names, scene = asyncio.run(main())
    return names, heard, scene


def test_stages_are_told_to_stop_and_their_reports_are_kept() -> None:
    names, heard, scene = dismissed(None, REPORT)
    assert names == {"stage host:1", "stage host:2"}
    assert heard == [Stop(), Stop()]
    assert [m.report for m in scene.members.placed] == [REPORT, REPORT]


def test_stages_of_a_ring_that_broke_are_told_why_with_its_code() -> None:
    _, heard, _ = dismissed(ModelError("No weights", where="x"), Trouble(4, "ok"))
    assert heard == [Trouble(4, "x: No weights.")] * 2


def test_a_stage_that_does_not_answer_is_not_waited_for_and_is_known_by_name() -> None:
    names, _, scene = dismissed(None, None)
    assert names == {"stage host:1"}
    assert [m.report for m in scene.members.placed] == [REPORT, None]


def test_a_very_long_reason_still_arrives() -> None:
    _, heard, _ = dismissed(NetworkError("€\x00" * 5000), REPORT)
    assert isinstance(heard[0], Trouble)
    assert heard[0].text.startswith("€ €")
    assert heard[0].text.endswith("…")
