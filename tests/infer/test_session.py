"""Why a generation ends, where its newest token lies, and what a request refuses."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest

from splitlm.core.errors import PromptError, UsageError
from splitlm.core.sampling import FinishReason, Sampling
from splitlm.infer.request import Request, seeded
from splitlm.infer.session import Session


def session(tokens: list[int], **options: object) -> Session:
    """A session with a prompt of three tokens that made these."""

    async def make() -> Session:
        return Session(1, Request((5, 6, 7), **options), 0, deque(), tokens=tokens)  # type: ignore[arg-type]

    return asyncio.run(make())


@pytest.mark.parametrize(
    ("tokens", "options", "context", "reason"),
    [
        ([9], {}, 100, None),
        ([9, 2], {"eos_ids": frozenset({2})}, 100, "eos"),
        ([9, 3], {"eos_ids": frozenset({2})}, 100, None),
        ([9, 9], {"max_new_tokens": 2}, 100, "length"),
        ([9], {"max_new_tokens": 2}, 100, None),
        ([9, 9], {}, 4, "context"),
        ([9, 9], {}, 5, None),
        ([9, 2], {"max_new_tokens": 2, "eos_ids": frozenset({2})}, 4, "eos"),
        ([9], {"accept": lambda token: "stop" if token == 9 else None}, 100, "stop"),
        ([8], {"accept": lambda token: "stop" if token == 9 else None}, 100, None),
    ],
)
def test_the_reason_for_the_last_token(
    tokens: list[int], options: dict[str, object], context: int, reason: FinishReason | None
) -> None:
    assert session(tokens, **options).ends_with(tokens[-1], context) == reason


def test_the_newest_token_lies_after_the_prompt() -> None:
    assert session([]).position == 2
    assert session([9]).position == 3
    assert session([9, 9]).position == 4


def test_the_record_of_a_session_that_was_left_says_cancelled() -> None:
    one = session([9, 9])
    assert (one.record().finish, one.record().tpot_p50_ms) == ("cancelled", None)
    one.finish, one.laps_ms = "eos", [1.0, 2.0, 3.0]
    record = one.record()
    assert (record.finish, record.tpot_p50_ms, record.new_tokens, record.prompt_tokens) == ("eos", 2.0, 2, 3)


def test_the_record_names_the_seed_where_tokens_were_drawn() -> None:
    drawn, greedy = Sampling(temperature=1.0, seed=7), Sampling(seed=7)
    assert [session([9], sampling=sampling).record().seed for sampling in (drawn, greedy)] == [7, None]


def test_a_seed_is_drawn_only_where_one_is_needed() -> None:
    assert seeded(None) == Sampling() and seeded(Sampling(top_k=3)).seed is None
    assert seeded(Sampling(temperature=1.0, seed=0)).seed == 0
    drawn = [seeded(Sampling(temperature=1.0, top_k=3)) for _ in range(8)]
    assert len({sampling.seed for sampling in drawn}) > 1 and {sampling.top_k for sampling in drawn} == {3}


@pytest.mark.parametrize(
    ("request_", "error", "says"),
    [
        (Request(()), PromptError, "no token"),
        (Request((1,) * 9), PromptError, "at most 8"),
        (Request((1, 16)), PromptError, "0 to 15"),
        (Request((1, -1)), PromptError, "0 to 15"),
        (Request((1,), max_new_tokens=0), UsageError, "at least 1"),
    ],
)
def test_what_the_model_cannot_take_is_refused(request_: Request, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        request_.check(8, 16)


def test_the_largest_request_is_taken() -> None:
    Request((0, 15) * 4, max_new_tokens=1).check(8, 16)
