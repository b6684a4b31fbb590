"""What is wrong on purpose must turn the check red, and the check must say from which token on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from splitlm.check.compare import Comparison
from splitlm.check.equivalence import Case, against, equivalence
from splitlm.core.cut import make_cut
from splitlm.model.compute.base import Job
from splitlm.model.compute.exact import ExactEngine
from splitlm.model.stage import Stage
from splitlm.model.uncut import Uncut
from tests.parity.chain import Bench, Step, forward, long_prompt, walk
from tests.tiny import FAMILIES, WINDOW

PROMPT = long_prompt()
CUT = (1, 3)
ROTARY = [family for family in FAMILIES if family != "gpt2"]


@pytest.fixture(scope="module")
def judge(tiny: Callable[[str], Path]) -> Callable[..., Comparison]:
    made: dict[tuple[str, str], tuple[Bench, Uncut]] = {}

    def run(family: str, step: Step, chunk: int = 128, dtype: str = "float32") -> Comparison:
        if (family, dtype) not in made:
            bench = Bench(tiny(family), dtype)
            made[family, dtype] = (bench, Uncut(bench.files))
        bench, uncut = made[family, dtype]
        ring = walk(bench.stages(make_cut(bench.files.blocks, CUT)), PROMPT, 6, chunk, step)
        return against(uncut, Case("", tuple(PROMPT)), ring, 6, chunk, dtype)

    return run


def red(result: Comparison, index: int) -> None:
    assert not result.ok and not result.bit_equal
    assert result.first_bad is not None and result.first_bad.index == index, result.failure
    assert f"at index {index}" in result.failure
    assert ("KV" in result.failure) is (index > 0) and ("mask" in result.failure) is (index == 0)


def decoding(position: int) -> bool:
    return position >= len(PROMPT)


def is_middle(stage: Stage) -> bool:
    return stage.segment.begin == CUT[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_wrong_is_green(family: str, judge: Callable[..., Comparison]) -> None:
    assert judge(family, forward).bit_equal


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_position_plus_one(family: str, dtype: str, judge: Callable[..., Comparison]) -> None:
    """On every decode step of one stage. GPT-2 knows positions on its first stage only."""

    def step(stage: Stage, inputs: torch.Tensor, position: int, last: bool) -> torch.Tensor | None:
        wrong = stage.segment.embed if family == "gpt2" else is_middle(stage)
        if not (wrong and decoding(position)):
            return forward(stage, inputs, position, last)
        cache = stage._sessions[1]
        (out,) = stage.engine.run([Job(inputs, position + 1, cache, last)])
        cache.seen += inputs.shape[1]
        return out

    result = judge(family, step, dtype=dtype)
    if dtype == "float32":
        red(result, 1)
    else:  # whose rounding can hide a mistake from the bound, and never from the bits
        assert not result.bit_equal and not result.steps[1].bit_equal and result.steps[0].bit_equal


@pytest.mark.parametrize("family", ROTARY)
def test_positions_that_start_again_on_a_later_stage(family: str, judge: Callable[..., Comparison]) -> None:
    """Each chunk counted from zero: prefill itself is wrong."""

    def step(stage: Stage, inputs: torch.Tensor, position: int, last: bool) -> torch.Tensor | None:
        if not is_middle(stage):
            return forward(stage, inputs, position, last)
        cache = stage._sessions[1]
        (out,) = stage.engine.run([Job(inputs, 0, cache, last)])
        cache.seen += inputs.shape[1]
        return out

    red(judge(family, step, chunk=9), 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_row_of_kv_dropped(family: str, judge: Callable[..., Comparison]) -> None:
    def step(stage: Stage, inputs: torch.Tensor, position: int, last: bool) -> torch.Tensor | None:
        if is_middle(stage) and position == len(PROMPT):
            for layer in stage._sessions[1].layers:
                layer._rows -= 1
        return forward(stage, inputs, position, last)

    red(judge(family, step), 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_that_lets_the_future_in(family: str, judge: Callable[..., Comparison]) -> None:
    def step(stage: Stage, inputs: torch.Tensor, position: int, last: bool) -> torch.Tensor | None:
        if not is_middle(stage) or decoding(position):
            return forward(stage, inputs, position, last)
        n = inputs.shape[1]
        everything = torch.ones(1, 1, n, n, dtype=torch.bool)
        kinds = {"full_attention": everything, "sliding_attention": everything}
        cache = stage._sessions[1]
        with torch.inference_mode():
            out: torch.Tensor = stage.engine._base(  # type: ignore[attr-defined]
                inputs_embeds=inputs,
                position_ids=torch.arange(n).unsqueeze(0),
                attention_mask=kinds if family.startswith(("gemma", "qwen")) else everything,
                use_cache=True,
                **{stage.engine._cache_name: cache},  # type: ignore[attr-defined]
            )[0]
        cache.seen += n
        return out

    red(judge(family, step), 0)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
def test_a_window_that_is_one_row_too_short(family: str, judge: Callable[..., Comparison]) -> None:
    def step(stage: Stage, inputs: torch.Tensor, position: int, last: bool) -> torch.Tensor | None:
        for layer in stage._sessions[1].layers if is_middle(stage) else ():
            if layer.window is not None and layer._rows == WINDOW - 1:
                layer._rows, layer._start = layer._rows - 1, layer._start + 1
        return forward(stage, inputs, position, last)

    red(judge(family, step), 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_forward(family: str, judge: Callable[..., Comparison]) -> None:
    """A decode step computed twice leaves its keys twice: its own token is right, the next one is not."""

    def step(stage: Stage, inputs: torch.Tensor, position: int, last: bool) -> torch.Tensor | None:
        out = forward(stage, inputs, position, last)
        if is_middle(stage) and position == len(PROMPT):
            stage.engine.run([Job(inputs, position, stage._sessions[1], last)])
        return out

    red(judge(family, step), 2)


def test_logits_that_differ_fail_though_every_id_agrees(judge: Callable[..., Comparison]) -> None:
    def step(stage: Stage, inputs: torch.Tensor, position: int, last: bool) -> torch.Tensor | None:
        out = forward(stage, inputs, position, last)
        return out + 1e-3 if stage.segment.head and decoding(position) and out is not None else out

    result = judge("llama", step)
    assert result.matches == len(result.steps)
    red(result, 1)
    assert "the ids agree" in result.failure


@pytest.mark.parametrize("shift", [0, 1])
def test_the_whole_check_sees_it(shift: int, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the ring to the verdict: its engine is wrong on decode steps, and transformers' own model is not."""
    run = ExactEngine.run

    def moved(self: ExactEngine, jobs: Sequence[Job]) -> list[torch.Tensor | None]:
        late = [shift * (job.cache.seen > 0 and job.inputs.shape[1] == 1) for job in jobs]
        return run(self, [replace(job, position=job.position + by) for job, by in zip(jobs, late, strict=True)])

    monkeypatch.setattr(ExactEngine, "run", moved)
    result = equivalence(str(tiny("llama")), ["A fox", "The sea"], max_new_tokens=6, stages=1)
    assert result.ok is not bool(shift) and len(result.outcomes) == 2
    for outcome in result.outcomes:
        if shift:
            red(outcome.comparison, 1)
        else:
            assert outcome.comparison.bit_equal
