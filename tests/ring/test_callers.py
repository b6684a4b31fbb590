"""A ring and its callers: one that asks for nonsense, one that forks, and one that forgets to close it."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from splitlm.core.errors import NetworkError, PromptError, UsageError
from splitlm.core.sampling import Sampling
from splitlm.local import Ring
from splitlm.node.members import Members
from tests.forked import forked

pytestmark = pytest.mark.usefixtures("forks")
PROMPT = [1, 40, 41]
NEW = 24


@pytest.fixture(scope="module")
def ring(tiny: Callable[[str], Path]) -> Iterator[Ring]:
    with Ring(str(tiny("llama")), stages=2, threads=1) as opened:
        yield opened


WRONG: list[tuple[type[UsageError], dict[str, Any]]] = [
    (PromptError, {"prompt": [-1]}),
    (PromptError, {"prompt": [10**30]}),
    (PromptError, {"prompt": [1.5]}),
    (PromptError, {"prompt": b"ab"}),
    (PromptError, {"prompt": None}),
    (PromptError, {"prompt": []}),
    (UsageError, {"max_new_tokens": 2.5}),
    (UsageError, {"max_new_tokens": float("inf")}),
    (UsageError, {"max_new_tokens": None}),
    (UsageError, {"stop": [5]}),
    (UsageError, {"sampling": {"temperature": 1}}),
]


def test_a_call_that_makes_no_sense_is_its_callers_trouble_alone(ring: Ring) -> None:
    alone = ring.generate(PROMPT, max_new_tokens=NEW, ignore_eos=True).tokens
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(ring.generate, PROMPT, max_new_tokens=NEW, ignore_eos=True)
        for kind, asked in WRONG:
            with pytest.raises(kind) as caught:
                ring.generate(**{"prompt": PROMPT, **asked})
            assert type(caught.value) is kind
            with pytest.raises(kind):
                list(ring.stream(**{"prompt": PROMPT, **asked}))
        for field, value in (("top_k", 10**30), ("top_k", 2.5), ("seed", 1.5), ("temperature", True)):
            with pytest.raises(UsageError):
                ring.generate(PROMPT, sampling=Sampling(**{field: value}))
        assert beside.result(60).tokens == alone
    assert ring.error is None


def test_numbers_of_other_types_are_numbers(ring: Ring) -> None:
    plain = ring.generate(PROMPT, max_new_tokens=4, sampling=Sampling(temperature=0.5, top_k=9, seed=3), logits=True)
    sampling = Sampling(temperature=np.float32(0.5), top_k=np.int32(9), seed=np.int64(3))  # type: ignore[arg-type]
    for ids in (np.array(PROMPT), torch.tensor(PROMPT)):
        made = ring.generate(ids, max_new_tokens=np.int64(4), sampling=sampling, logits=np.bool_(True))  # type: ignore[arg-type]
        assert (made.tokens, made.seed, len(made.logits)) == (plain.tokens, 3, 4)


def test_a_forked_child_is_refused_and_harms_nobody(ring: Ring) -> None:
    before = ring.generate(PROMPT, max_new_tokens=4).tokens

    def child() -> None:
        with pytest.raises(NetworkError, match="forked from it"):
            ring.generate(PROMPT, max_new_tokens=4)
        ring.close()

    assert forked(child) == 0
    assert ring.generate(PROMPT, max_new_tokens=4).tokens == before


def test_a_ring_that_was_dropped_leaves_no_stage_and_no_thread(tiny: Callable[[str], Path]) -> None:
    others = set(threading.enumerate())
    dropped = Ring(str(tiny("llama")), stages=2, threads=1)
    dropped.open()
    dropped.generate(PROMPT, max_new_tokens=2)
    pids, seen = dropped.stage_pids, weakref.ref(dropped)
    with pytest.warns(ResourceWarning, match="without close"):
        del dropped
        gc.collect()
    assert seen() is None
    end = time.monotonic() + 30
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) or set(threading.enumerate()) - others:
        assert time.monotonic() < end, (left, threading.enumerate())
        time.sleep(0.02)


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_a_ring_that_was_closed_warns_of_nothing(tiny: Callable[[str], Path]) -> None:
    with Ring(str(tiny("llama")), threads=1) as closed:
        closed.generate(PROMPT, max_new_tokens=2)
    del closed
    gc.collect()


def test_a_limit_that_the_head_meets_is_told_in_words(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No traceback of a group, whose reader would look for a fault of ours."""

    async def full(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Members, "assign", full)
    with pytest.raises(NetworkError, match=r"limit of the machine was reached \(Too many open files\)"):
        Ring(str(tiny("llama")), stages=2, threads=1).open()
