"""A stage computes for many sessions, and refuses steps that do not follow."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from splitlm.core.cut import make_cut
from splitlm.core.errors import ProtocolError
from splitlm.model.compute.base import Job
from splitlm.model.compute.paced import PacedEngine
from splitlm.model.load import ModelFiles
from splitlm.model.stage import Stage, build_stages, resident_bytes
from tests.model.made import PROMPT, chain, same_as_uncut
from tests.tiny import HIDDEN, VOCAB, WINDOW

ROW = 2 * 2 * 16 * 4
"""Bytes of one token's keys and values in one block: two heads of 16 numbers in float32."""


@pytest.fixture
def stages(tiny: Callable[[str], Path]) -> list[Stage]:
    files = ModelFiles(tiny("llama"))
    return build_stages(files, make_cut(5, (1, 3)).segments)


def ids(*tokens: int) -> torch.Tensor:
    return torch.tensor([tokens])


def test_real_models_too(stories: Path, tarot: Path) -> None:
    same_as_uncut(stories, (1, 3), new=40)
    same_as_uncut(stories, (0, 2), private=True, new=4)
    same_as_uncut(tarot, (1, 3), new=20)


def test_sessions_do_not_see_each_other(stages: list[Stage]) -> None:
    alone = chain(stages, PROMPT, [5, 6, 7], 16)
    for stage in stages:
        stage.open(2)
    mixed = chain(stages, PROMPT[:20], [], 16)
    for session, token, position in ((2, 9, 0), (2, 8, 1)):
        x: torch.Tensor | None = ids(token)
        for stage in stages:
            assert x is not None
            x = stage.forward(session, x, position, logits=True)
    again = chain(stages, PROMPT, [5, 6, 7], 16)
    assert len(mixed) == 1
    assert all(torch.equal(a, b) for a, b in zip(alone, again, strict=True))
    assert stages[0].sessions == [2, 1]


def test_kv_is_counted_to_the_byte(stages: list[Stage], tiny: Callable[[str], Path]) -> None:
    chain(stages, PROMPT, [5, 6], 16)
    stages[0].open(2)
    stages[0].forward(2, ids(1, 2, 3), 0)
    assert [s.kv_bytes(1) for s in stages] == [39 * ROW, 78 * ROW, 78 * ROW]
    assert (stages[0].kv_bytes(), stages[0].kv_bytes(2), stages[0].kv_bytes(99)) == (42 * ROW, 3 * ROW, 0)
    stages[0].close(1)
    stages[0].close(1)
    assert stages[0].kv_bytes() == 3 * ROW
    sliding = build_stages(ModelFiles(tiny("gemma3")), make_cut(5, (2,)).segments)
    chain(sliding, PROMPT, [], 16)
    assert [s.kv_bytes() for s in sliding] == [2 * (WINDOW - 1) * ROW, (2 * len(PROMPT) + WINDOW - 1) * ROW]


def test_logits_only_where_and_when_they_are_wanted(stages: list[Stage]) -> None:
    for stage in stages:
        stage.open(1)
    x = stages[0].forward(1, ids(3, 4), 0, logits=True)
    assert x is not None and x.shape == (1, 2, HIDDEN)
    x = stages[1].forward(1, x, 0, logits=True)
    assert x is not None and x.shape == (1, 2, HIDDEN)
    assert stages[2].forward(1, x, 0) is None
    assert stages[2].kv_bytes() == 2 * 2 * ROW
    y = stages[0].forward(1, ids(5), 2)
    assert y is not None
    y = stages[1].forward(1, y, 2)
    assert y is not None
    out = stages[2].forward(1, y, 2, logits=True)
    assert out is not None and out.shape == (VOCAB,)


def test_steps_that_do_not_follow_are_refused_and_change_nothing(stages: list[Stage]) -> None:
    first, middle = stages[0], stages[1]
    with pytest.raises(ProtocolError, match="Session 1 is not open"):
        first.forward(1, ids(3), 0)
    first.open(1)
    with pytest.raises(ProtocolError, match="opened twice"):
        first.open(1)
    first.forward(1, ids(3, 4), 0)
    for position in (0, 1, 3, -1):
        with pytest.raises(ProtocolError, match=f"position {position}.*Expected position 2"):
            first.forward(1, ids(5), position)
    middle.open(1)
    hidden = torch.zeros(1, 1, HIDDEN)
    wrong_ids = [ids(VOCAB), ids(-1), ids(), ids(1).int(), torch.tensor([1]), ids(1).repeat(2, 1), hidden]
    wrong_hidden = [hidden.bfloat16(), hidden[0], hidden.repeat(2, 1, 1), hidden[:, :0], hidden[..., 1:], ids(1)]
    for stage, inputs, at in [(first, x, 2) for x in wrong_ids] + [(middle, x, 0) for x in wrong_hidden]:
        before = stage.kv_bytes()
        with pytest.raises(ProtocolError):
            stage.forward(1, inputs, at)
        assert stage.kv_bytes() == before
    assert first.forward(1, ids(5), 2) is not None
    assert middle.forward(1, hidden, 0) is not None


def test_a_stage_may_hold_an_embedding_or_a_head_alone(tiny: Callable[[str], Path]) -> None:
    for family in ("llama", "gpt2", "gemma3"):
        same_as_uncut(tiny(family), (0,), private=True, new=4)


def test_resident_bytes_are_those_of_parameters_and_buffers(stages: list[Stage]) -> None:
    block = sum(p.nbytes for p in stages[0].part.module.model.layers[0].parameters())
    rotary = 2 * 8 * 4
    assert resident_bytes(stages[1:2]) == 2 * block + rotary
    assert resident_bytes(stages[:1]) == block + VOCAB * HIDDEN * 4 + rotary


def test_no_graph_is_kept(stages: list[Stage]) -> None:
    stages[0].open(1)
    out = stages[0].forward(1, ids(3), 0)
    assert out is not None and not out.requires_grad


def test_a_paced_stage_takes_its_time_and_changes_nothing(stages: list[Stage]) -> None:
    plain = chain(stages, PROMPT[:4], [5], 16)
    for stage in stages:
        stage.engine = PacedEngine(stage.engine, stage.part, 100 / max(1, stage.segment.count))
    started = time.perf_counter()
    paced = chain(stages, PROMPT[:4], [], 16)
    assert time.perf_counter() - started >= 0.3
    assert torch.equal(plain[0], paced[0])
    assert stages[0].engine.name.startswith("exact, paced at ") and stages[0].engine.name.endswith(" ms per block")


# Mutants of a ring: each must show, or the comparison with the uncut model proves nothing


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mistral"])
@pytest.mark.parametrize("mutant", ["position", "token", "mask", "twice"])
def test_mutants_show(mutant: str, family: str, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    files = ModelFiles(tiny(family))
    stages = build_stages(files, make_cut(5, (2,)).segments)
    right = chain(stages, PROMPT, [5, 6, 7], 16)
    tail = stages[1]
    run = type(tail.engine).run
    engine = tail.engine

    def mutated(jobs: list[Job]) -> list[torch.Tensor | None]:
        (job,) = jobs
        n = job.inputs.shape[1]
        if mutant == "twice" and n == 1:
            run(engine, jobs)
        if mutant == "token" and n == 1:
            for layer in job.cache.layers:
                layer._rows -= 1
        inputs = job.inputs.flip(1) if mutant == "mask" and n > 1 else job.inputs
        at = job.position + (mutant == "position" and n == 1)
        return run(engine, [replace(job, inputs=inputs, position=at)])

    monkeypatch.setattr(tail.engine, "run", mutated, raising=False)
    if mutant == "position" and family == "gpt2":
        first = stages[0].engine
        monkeypatch.setattr(
            first,
            "run",
            lambda jobs: run(first, [replace(j, position=j.position + (j.inputs.shape[1] == 1)) for j in jobs]),
        )
    wrong = chain(stages, PROMPT, [5, 6, 7], 16)
    assert max((a - b).abs().max().item() for a, b in zip(right, wrong, strict=True)) > 1e-3
