"""What a caller may ask for: of any type that means a number, and nothing that a frame cannot carry."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from splitlm.core.errors import PromptError, UsageError
from splitlm.infer.request import Request, counted, seeded, stops, token_ids


@pytest.mark.parametrize(
    "given",
    [
        [1, 2],
        (1, 2),
        range(1, 3),
        (i for i in (1, 2)),
        np.array([1, 2]),
        np.array([1, 2], dtype=np.uint8),
        torch.tensor([1, 2]),
        torch.tensor([1, 2], dtype=torch.int32),
        [np.int64(1), torch.tensor(2)],
    ],
    ids=str,
)
def test_token_ids_become_plain_integers(given: object) -> None:
    ids = token_ids(given)
    assert ids == [1, 2]
    assert [type(token) for token in ids] == [int, int]


@pytest.mark.parametrize(
    "given",
    [
        None,
        5,
        1.5,
        b"ab",
        bytearray(b"ab"),
        memoryview(b"ab"),
        {1: 2},
        {1, 2},
        "ab",
        [1, 2.0],
        [1, "2"],
        [True, 2],
        [[1, 2]],
        [None],
        np.array([1.0, 2.0]),
        np.array([True]),
        np.array([[1, 2]]),
        np.array(1),
        torch.tensor([1.0]),
        torch.tensor([[1]]),
        torch.tensor(1),
    ],
    ids=str,
)
def test_what_are_no_token_ids_is_a_prompts_fault(given: object) -> None:
    with pytest.raises(PromptError, match=r"^prompt: The prompt (is|holds) .*Expected a text, or a sequence") as caught:
        token_ids(given)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("ids", [(-1,), (5, 10), (2**70,), (1.0,), (True,), (np.int64(1),)])
def test_ids_out_of_range_and_ids_that_no_frame_carries_are_refused(ids: tuple[int, ...]) -> None:
    Request((0, 9)).check(4, 10)
    with pytest.raises(PromptError, match="out of range"):
        Request(ids).check(4, 10)


def test_the_number_of_new_tokens() -> None:
    assert [counted(5), counted(np.int64(5))] == [5, 5]
    for bad in (2.5, None, float("inf"), "5", True, np.array([1, 2])):
        with pytest.raises(UsageError, match=r"^--max-new-tokens: .*Expected a whole number"):
            counted(bad)
    for low in (0, -1, 2.5, True):
        with pytest.raises(UsageError, match=r"^--max-new-tokens: .*Expected a whole number of at least 1"):
            Request((1,), low).check(4, 10)  # type: ignore[arg-type]


def test_stop_strings() -> None:
    assert [list(stops(given)) for given in ("ab", ["a", "b"], (), None)] == [["ab"], ["a", "b"], [], []]
    for bad in (5, [5], ["a", None], b"ab"):
        with pytest.raises(UsageError, match=r"^--stop: stop is .*Expected a text"):
            stops(bad)


def test_settings_of_another_type_are_refused() -> None:
    with pytest.raises(UsageError, match=r"Expected a splitlm.Sampling"):
        seeded({"temperature": 1})  # type: ignore[arg-type]
    whole = Request((1,))
    for other in (replace(whole, sampling={}), replace(whole, logits=1)):  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"Expected a splitlm.Sampling, and True or False"):
            other.check(4, 10)
