"""Something happens to somebody at some moment, again and again: always one named error, and nothing left."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from splitlm import Ring
from splitlm.core.errors import SplitlmError
from tests.faults.scene import PROMPT, Wounded, alive, nothing_left

PROMPTS = [PROMPT, "The dog", "A girl named Lily", "One day"]
NEW = 200
pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("forks")]


@pytest.fixture(scope="module")
def opening_s(stories: Path) -> float:
    """What a ring takes to open, so that it can be struck meanwhile on any machine."""
    begun = time.monotonic()
    with Wounded(stories):
        return time.monotonic() - begun


@pytest.fixture(scope="module")
def expected(stories: Path) -> list[str]:
    with Ring(str(stories), threads=1) as ring:
        return [ring.generate(prompt, max_new_tokens=NEW).text for prompt in PROMPTS]


@pytest.mark.parametrize("seed", [0, 2, 3, 7, 13, 17])  # each kind of strike, while it opens and while it runs
def test_whatever_happens_nothing_is_left(seed: int, stories: Path, expected: list[str], opening_s: float) -> None:
    chance = random.Random(seed)
    what = chance.choice(["kill", "stop", "close", "kill both", "terminate"])
    opening = chance.random() < 0.3
    after = chance.uniform(0.0, opening_s) if opening else chance.uniform(0.0, 0.6)
    victim = chance.randrange(2)
    errors: list[str] = []

    def strike(ring: Ring) -> None:
        time.sleep(after)
        pids = ring.stage_pids
        signals = {
            "kill": signal.SIGKILL,
            "kill both": signal.SIGKILL,
            "stop": signal.SIGSTOP,
            "terminate": signal.SIGTERM,
        }
        if what == "close":
            ring.close()
            return
        for pid in pids if what == "kill both" else pids[victim : victim + 1]:
            if alive(pid):
                os.kill(pid, signals[what])

    def generate(ring: Ring, i: int) -> None:
        pieces = []
        try:
            pieces.extend(ring.stream(PROMPTS[i], max_new_tokens=NEW))
        except SplitlmError as error:
            errors.append(str(error))
        assert expected[i].startswith("".join(pieces))

    with nothing_left():
        ring = Wounded(stories, ctrl_timeout_s=1.0)
        striker = threading.Thread(target=strike, args=(ring,))
        if opening:
            striker.start()
        try:
            with ring:
                if not opening:
                    striker.start()
                with ThreadPoolExecutor(4) as pool:
                    for job in [pool.submit(generate, ring, i) for i in range(4)]:
                        job.result(60)
        except SplitlmError as error:
            errors.append(str(error))
        striker.join()
        ring.close()
        pids = ring.stage_pids
    assert not any(map(alive, pids))
    assert all(error.endswith(".") and "\n" not in error for error in errors)
    if what != "close":  # all that the sessions were told is one reason
        assert len(set(errors)) <= 1, errors
