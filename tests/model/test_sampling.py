import math

import pytest
import torch
from torch import Tensor

from splitlm.core.errors import ModelError
from splitlm.core.sampling import Sampling
from splitlm.model.sampling import Sampler

VOCAB = 97
PROMPT = [3, 3, 50, 96, 7]


def logits_of(seed: int, vocab: int = VOCAB) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3


def dense(sampler: Sampler, logits: Tensor) -> Tensor:
    ids, probabilities = sampler.distribution(logits)
    return torch.zeros(len(logits)).scatter(0, ids, probabilities)


def theirs(sampling: Sampling, prompt: list[int], logits: Tensor) -> Tensor:
    """The distribution that transformers' own processors, in the order ``generate`` builds them, leave."""
    from transformers.generation import logits_process as hf

    chain = hf.LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    chain.append(hf.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        chain.append(hf.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        chain.append(hf.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chain.append(hf.MinPLogitsWarper(sampling.min_p))
    return torch.softmax(chain(torch.tensor([prompt]), logits[None].clone()), dim=-1)[0]


SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.3),
    Sampling(temperature=2.5, top_k=5),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=0.8, top_k=500),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=1.0, top_p=0.01),
    Sampling(temperature=1.0, top_p=1e-9),
    Sampling(temperature=1.5, min_p=0.1),
    Sampling(temperature=1.0, min_p=1.0),
    Sampling(temperature=1.0, repetition_penalty=1.7),
    Sampling(temperature=1.0, repetition_penalty=0.5),
    Sampling(temperature=1.3, top_k=40, top_p=0.8, min_p=0.05, repetition_penalty=1.3),
    Sampling(temperature=0.7, top_k=8, top_p=0.95, min_p=0.02),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_the_distribution_is_that_of_transformers(sampling: Sampling) -> None:
    for seed in range(25):
        logits = logits_of(seed)
        ours, expected = dense(Sampler(sampling, PROMPT), logits), theirs(sampling, PROMPT, logits)
        assert torch.equal(ours > 0, expected > 0)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-7)


def test_tokens_equal_to_the_kth_stay_as_in_transformers() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    sampling = Sampling(temperature=1.0, top_k=2)
    assert torch.equal(dense(Sampler(sampling), logits) > 0, theirs(sampling, [0], logits) > 0)
    assert (dense(Sampler(sampling), logits) > 0).tolist() == [True, True, True, True, False]


@pytest.mark.parametrize("temperature", [0.5, 3.0, 100.0])  # a nucleus of a few tokens, of some hundred, of most
def test_top_p_of_a_large_vocabulary_is_that_of_transformers(temperature: float) -> None:
    logits, sampling = logits_of(0, vocab=4000), Sampling(temperature=temperature, top_p=0.9)
    ours, expected = dense(Sampler(sampling), logits), theirs(sampling, [0], logits)
    assert torch.equal(ours > 0, expected > 0)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-7)


def test_top_p_that_is_met_exactly_keeps_no_token_more() -> None:
    sampling = Sampling(temperature=1.0, top_p=0.75)
    kept = dense(Sampler(sampling), torch.zeros(4)) > 0
    assert kept.sum() == (theirs(sampling, [0], torch.zeros(4)) > 0).sum() == 3


def test_generated_tokens_join_the_penalised_history() -> None:
    sampling = Sampling(temperature=1.0, repetition_penalty=2.0, seed=5)
    sampler, history = Sampler(sampling, PROMPT), list(PROMPT)
    for step in range(20):
        logits = logits_of(step)
        torch.testing.assert_close(dense(sampler, logits), theirs(sampling, history, logits), rtol=1e-4, atol=1e-7)
        history.append(sampler.next(logits))


def test_greedy_with_a_penalty_leaves_the_token_just_taken() -> None:
    sampler = Sampler(Sampling(repetition_penalty=3.0))
    logits = torch.tensor([1.0, 5.0, 4.0])
    assert [sampler.next(logits) for _ in range(3)] == [1, 2, 1]  # 5, then 4 > 5/3, then 5/3 > 4/3
    assert logits.tolist() == [1.0, 5.0, 4.0]


def test_greedy_takes_the_first_of_equals() -> None:
    assert Sampler(Sampling()).next(torch.tensor([0.0, 7.0, 7.0, 7.0])) == 1


def test_greedy_neither_copies_nor_sorts(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(0).to(torch.bfloat16)
    for name in ("sort", "topk", "softmax", "clone"):
        monkeypatch.setattr(torch, name, None)
    monkeypatch.setattr(Tensor, "float", None)
    assert Sampler(Sampling(), PROMPT).next(logits) == logits.argmax().item()


def test_ids_outside_the_head_are_ignored_by_the_penalty() -> None:
    sampler = Sampler(Sampling(repetition_penalty=2.0), [VOCAB, VOCAB + 4000])
    assert sampler.next(logits_of(1)) == logits_of(1).argmax().item()


def test_top_k_of_one_is_greedy() -> None:
    one, greedy = Sampler(Sampling(temperature=1.7, top_k=1)), Sampler(Sampling())
    assert all(one.next(logits_of(seed)) == greedy.next(logits_of(seed)) for seed in range(30))


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300])
def test_a_very_low_temperature_is_greedy(temperature: float) -> None:
    sampler = Sampler(Sampling(temperature=temperature, seed=1))
    assert all(sampler.next(logits_of(seed)) == logits_of(seed).argmax().item() for seed in range(30))


def test_a_very_high_temperature_is_nearly_uniform() -> None:
    probabilities = dense(Sampler(Sampling(temperature=100.0)), logits_of(0))
    assert probabilities.max() < 1.3 / VOCAB
    assert probabilities.min() > 0.7 / VOCAB


def test_same_seed_same_tokens_and_another_seed_others() -> None:
    def run(seed: int) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.5, seed=seed))
        return [sampler.next(logits_of(step)) for step in range(40)]

    assert run(11) == run(11)
    assert run(11) != run(12)


def test_a_drawn_seed_is_told_and_repeats_the_run() -> None:
    first = Sampler(Sampling(temperature=1.5))
    again = Sampler(Sampling(temperature=1.5, seed=first.seed))
    assert [first.next(logits_of(i)) for i in range(40)] == [again.next(logits_of(i)) for i in range(40)]
    assert first.seed != Sampler(Sampling(temperature=1.5)).seed


def test_sessions_do_not_share_their_generator() -> None:
    alone, other = Sampler(Sampling(temperature=1.5, seed=3)), Sampler(Sampling(temperature=1.5, seed=4))
    expected = [alone.next(logits_of(i)) for i in range(20)]
    beside = Sampler(Sampling(temperature=1.5, seed=3))
    got = []
    for i in range(20):
        other.next(logits_of(i))
        torch.rand(3)
        got.append(beside.next(logits_of(i)))
    assert got == expected


def test_frequencies_follow_the_probabilities() -> None:
    sampling = Sampling(temperature=0.9, top_k=6, top_p=0.95, seed=20)
    logits, draws = logits_of(2), 4000
    expected = theirs(sampling, [0], logits)
    sampler = Sampler(sampling)
    counts = torch.bincount(torch.tensor([sampler.next(logits) for _ in range(draws)]), minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    assert (expected > 0).sum() > 2
    spread = (expected * (1 - expected) / draws).sqrt()
    assert ((counts / draws - expected).abs() <= 5 * spread).all()


def test_a_banned_token_is_never_drawn() -> None:
    logits = torch.tensor([0.0, -math.inf, 0.0, -math.inf])
    sampler = Sampler(Sampling(temperature=100.0, seed=0))
    assert {sampler.next(logits) for _ in range(200)} == {0, 2}


def test_the_lowest_random_number_skips_a_banned_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.zeros(1, dtype=torch.float64))
    assert Sampler(Sampling(temperature=1.0)).next(torch.tensor([-math.inf, -math.inf, 0.0, 0.0])) == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=3)])
def test_broken_logits_are_refused_with_their_position(sampling: Sampling, bad: float) -> None:
    sampler = Sampler(sampling, PROMPT)
    sampler.next(logits_of(0))
    logits = logits_of(1)
    logits[40] = bad
    with pytest.raises(ModelError, match=f"position {len(PROMPT) + 1} hold a {bad}"):
        sampler.next(logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_but_minus_infinity_is_refused(temperature: float) -> None:
    with pytest.raises(ModelError, match="position 0 are all -inf"):
        Sampler(Sampling(temperature=temperature)).next(torch.full((VOCAB,), -math.inf))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_float_type_is_taken_and_left_alone(dtype: torch.dtype) -> None:
    logits = logits_of(0).to(dtype)
    before = logits.clone()
    token = Sampler(Sampling(temperature=0.5, top_k=9, min_p=0.1, repetition_penalty=1.5, seed=1), PROMPT).next(logits)
    assert 0 <= token < VOCAB
    assert torch.equal(logits, before)
