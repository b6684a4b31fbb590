"""The uncut reference is what transformers' own generate computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from splitlm.model.load import Loader, ModelFiles
from splitlm.model.uncut import Uncut
from tests.tiny import CONTEXT, FAMILIES

LOADERS: tuple[Loader, ...] = ("hf", "shard")
PROMPT = list(range(3, 30))


def by_generate(folder: Path, prompt: list[int], new: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return [int(i) for i in out[0, len(prompt) :]]


def by_us(folder: Path, prompt: list[int], new: int, loader: Loader, chunk: int = 1 << 20) -> list[int]:
    run = Uncut(ModelFiles(folder), loader=loader).generate(prompt, new, prefill_chunk=chunk)
    return [token for token, _ in run]


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_ids_are_those_of_generate(family: str, loader: Loader, tiny: Callable[[str], Path]) -> None:
    wanted = by_generate(tiny(family), PROMPT, 24)
    assert by_us(tiny(family), PROMPT, 24, loader) == wanted
    assert by_us(tiny(family), PROMPT, 24, loader, chunk=10) == wanted


@pytest.mark.parametrize("loader", LOADERS)
def test_real_models_too(loader: Loader, stories: Path, tarot: Path) -> None:
    assert by_us(stories, [1, 403, 407], 60, loader) == by_generate(stories, [1, 403, 407], 60)
    assert by_us(tarot, [5, 17, 300], 40, loader) == by_generate(tarot, [5, 17, 300], 40)


def test_the_golden_text_of_another_program(stories: Path) -> None:
    golden = (stories / "expected_greedy_200.txt").read_text()
    ids = by_us(stories, [1], 200, "shard")
    text = AutoTokenizer.from_pretrained(stories).decode(ids, skip_special_tokens=True)
    assert text.strip() and text.strip()[:400] == golden.strip()[:400]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_both_loaders_give_the_same_logits(family: str, tiny: Callable[[str], Path]) -> None:
    files = ModelFiles(tiny(family))
    one, two = (list(Uncut(files, loader=x).generate(PROMPT, 12, prefill_chunk=16)) for x in LOADERS)
    assert len(one) == 12
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in zip(one, two, strict=True))


@pytest.mark.parametrize("loader", LOADERS)
def test_where_it_ends(loader: Loader, tiny: Callable[[str], Path]) -> None:
    files = ModelFiles(tiny("llama"))
    model = Uncut(files, loader=loader)
    every = [token for token, _ in model.generate(PROMPT, 10, prefill_chunk=16)]
    assert len(every) == 10
    stop = every[4]
    until = [t for t, _ in model.generate(PROMPT, 10, prefill_chunk=16, eos_ids=frozenset({stop}))]
    assert until == every[: every.index(stop) + 1]
    assert list(model.generate([], 10, prefill_chunk=16)) == []
    assert list(model.generate(PROMPT, 0, prefill_chunk=16)) == []
    full = list(model.generate(PROMPT, 10_000, prefill_chunk=16))
    assert len(full) == CONTEXT - len(PROMPT) + 1
    again = [token for token, _ in model.generate(PROMPT, 10, prefill_chunk=16)]
    assert again == every


def test_forced_tokens_are_fed_and_not_chosen(tiny: Callable[[str], Path]) -> None:
    model = Uncut(ModelFiles(tiny("llama")))
    free = list(model.generate(PROMPT, 4, prefill_chunk=16))
    forced = [(free[0][0] + 1) % 100 + 3, 9, 9]
    other = list(model.generate(PROMPT, 4, prefill_chunk=16, forced=forced))
    assert torch.equal(free[0][1], other[0][1])
    assert not torch.equal(free[1][1], other[1][1])
    same = list(model.generate(PROMPT, 4, prefill_chunk=16, forced=[token for token, _ in free]))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(free, same, strict=True))
