"""Stages that do not fit: both sides say what differs, end with the code of its class, and leave nothing."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from splitlm.core.errors import CutError, ModelError, NetworkError, PeerMissingError
from splitlm.node import join
from splitlm.node.settings import Place
from splitlm.wire.handshake import Claims
from tests.faults.scene import HOST, PROMPT, ThreadStage, Wounded, free_ports, nothing_left, settings

pytestmark = pytest.mark.timeout(60)


def ring_of(model: Path, port: int, count: int = 2, **options: object) -> Wounded:
    return Wounded(model, listen=(HOST, port), token="t", stages=count, **{"deadline_s": 20.0, **options})


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", "9.9"),
        ("protocol", 77),
        ("model", "feedface"),
        ("weights", "feedface"),
        ("tokenizer", "feedface"),
        ("dtype", "float16"),
        ("ring", "another"),
        ("epoch", 5),
    ],
)
def test_a_claim_that_differs_on_a_data_link_is_named_on_both_sides(
    field: str, value: object, stories: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = join.claims_for
    ours: list[object] = []

    def lie(*args: object, **options: object) -> Claims:
        claims = honest(*args, **options)  # type: ignore[arg-type]
        ours.append(getattr(claims, field))
        return msgspec.structs.replace(claims, **{field: value})

    monkeypatch.setattr(join, "claims_for", lie)
    with nothing_left():
        stage = ThreadStage(settings(port))
        ring = ring_of(stories, port)
        with pytest.raises(NetworkError) as caught:
            ring.open()
        theirs = stage.join()
        assert theirs is not None
        for error in (caught.value, theirs):
            text = str(error)
            assert error.exit_code == 3
            assert f"claim '{field}'" in text
            assert repr(value) in text
            assert repr(ours[0]) in text


def test_a_stage_with_another_model_of_its_own(stories: Path, tiny: Callable[[str], Path], port: int) -> None:
    with nothing_left():
        stage = ThreadStage(settings(port, model=str(tiny("llama"))))
        with pytest.raises(
            NetworkError, match=r"The model config hash differs: .*head.* has .*stage 1.* has |config hash"
        ):
            ring_of(stories, port).open()
        error = stage.join()
        assert error is not None
        assert "config hash differs" in str(error)


def test_an_engine_that_the_stages_build_lacks(stories: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "ENGINES", ("exact",))
    with nothing_left():
        stage = ThreadStage(settings(port))
        with pytest.raises(NetworkError, match=r"stage .* stopped: .*the engine 'fast', which this build .* does not"):
            ring_of(stories, port, compute="fast").open()
        error = stage.join()
        assert error is not None and error.exit_code == 3
        assert "Expected exact" in str(error)


def test_a_stage_with_another_token_is_not_let_in_and_the_ring_waits_on(stories: Path, port: int) -> None:
    with nothing_left():
        stranger = ThreadStage(settings(port, token="wrong"))
        ring = ring_of(stories, port, deadline_s=30.0)
        stage = ThreadStage(settings(port, deadline_s=30.0))
        with ring:
            assert ring.generate(PROMPT, max_new_tokens=2).tokens
        refused = stranger.join()
        assert refused is not None
        assert refused.exit_code == 3
        assert "tokens differ" in str(refused)
        assert stage.join() is None


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_checkpoint_that_is_at_fault_on_the_stages_machine(
    damage: str, stories: Path, tmp_path: Path, port: int
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(stories, copy)
    weights = copy / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:100_000])
    with nothing_left():
        stages = [ThreadStage(settings(port, model=str(copy))), ThreadStage(settings(port, model=str(copy)))]
        with pytest.raises(ModelError, match=r"Node \d \(stage .*\) stopped: .*copy") as caught:
            ring_of(stories, port, count=3).open()
        errors = [stage.join() for stage in stages]
        assert caught.value.exit_code == 4
        assert [error and error.exit_code for error in errors] == [4, 4]


def test_stages_learn_why_the_head_gives_up(stories: Path, tmp_path: Path, port: int) -> None:
    with nothing_left():
        good = ThreadStage(settings(port))
        bad = ThreadStage(settings(port, model=str(tmp_path)))
        with pytest.raises(ModelError):
            ring_of(stories, port, count=3).open()
        assert bad.join() is not None
        told = good.join()
        assert told is not None
        assert re.search(r"The head gave up: Node \d \(stage .*\) stopped: ", str(told))
        assert told.exit_code == 4


def test_a_stage_waits_for_its_head_until_the_deadline_and_names_it(port: int) -> None:
    with nothing_left():
        stage = ThreadStage(settings(port, deadline_s=0.3))
        error = stage.join()
        assert isinstance(error, PeerMissingError)
        assert re.search(rf"stage \S+ waited 0\.3 s for the head at {HOST}:{port}", str(error))


def test_a_head_waits_for_its_stages_until_the_deadline_and_tells_those_that_came(stories: Path, port: int) -> None:
    with nothing_left():
        stage = ThreadStage(settings(port))
        with pytest.raises(PeerMissingError, match=rf"{HOST}:{port}: The head waited 3 s for 2 stages; 1 came"):
            ring_of(stories, port, count=3, deadline_s=3.0).open()
        error = stage.join()
        assert error is not None
        assert error.exit_code == 3
        assert "The head gave up" in str(error)
        assert "1 came" in str(error)


def test_a_place_that_is_missing_is_named_at_the_deadline(stories: Path) -> None:
    control, a, b = free_ports(3)
    place = Place(3, -1, (HOST, a), (HOST, b))
    with nothing_left():
        stage = ThreadStage(settings(control, place=place))
        ring = ring_of(stories, control, data=(HOST, b), send=(HOST, a), static=2, deadline_s=3.0)
        with pytest.raises(CutError, match=r"nobody holds block 2") as caught:
            ring.open()
        error = stage.join()
        assert error is not None
        assert (caught.value.exit_code, error.exit_code) == (2, 2)
        assert "block 2" in str(error)


@pytest.mark.parametrize("first", ["stages", "head"])
def test_start_order_does_not_matter_and_a_ring_opens_twice_but_not_at_once(
    first: str, stories: Path, port: int
) -> None:
    with nothing_left():
        texts = []
        ring = ring_of(stories, port)
        for _ in range(2):
            stages: list[ThreadStage] = []

            def start(ring: Wounded, line: str, stages: list[ThreadStage] = stages) -> None:
                if line.startswith("waiting for 1 stage"):
                    stages.append(ThreadStage(settings(port)))

            if first == "stages":
                stages.append(ThreadStage(settings(port)))
            else:
                ring._say = lambda line, start=start: start(ring, line)  # type: ignore[misc]
            with ring:
                texts.append(ring.generate(PROMPT, max_new_tokens=8).text)
                with pytest.raises(Exception, match="open already"):
                    ring.open()
                texts.append(ring.generate(PROMPT, max_new_tokens=8).text)
            assert [stage.join() for stage in stages] == [None]
        assert len(texts) == 4
        assert len(set(texts)) == 1


def test_two_rings_of_one_model_in_one_process_are_two(stories: Path) -> None:
    ports = free_ports(2)
    with nothing_left():
        stages = [ThreadStage(settings(port)) for port in ports]
        with ring_of(stories, ports[0]) as one, ring_of(stories, ports[1]) as two:
            assert one.generate(PROMPT, max_new_tokens=8).text == two.generate(PROMPT, max_new_tokens=8).text
            assert one._host._ring != two._host._ring  # type: ignore[union-attr]
        assert [stage.join() for stage in stages] == [None, None]
