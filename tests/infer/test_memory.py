"""Memory that runs out, as torch and Python say it, becomes one paragraph wherever work runs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from splitlm.core.errors import SplitlmError
from splitlm.model.load import ModelFiles
from splitlm.model.runner import Runner, memory_told, out_of_memory
from splitlm.model.stage import Stage
from splitlm.model.uncut import Uncut

TOLD = [
    MemoryError(),
    MemoryError("cannot allocate"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


@pytest.mark.parametrize("error", TOLD, ids=str)
def test_every_way_of_saying_it_becomes_a_paragraph(error: BaseException) -> None:
    told = out_of_memory(error)
    assert type(told) is SplitlmError
    assert told.exit_code == 1
    assert str(told).startswith(f"Memory ran out ({type(error).__name__}")
    assert str(error)[:40] in str(told)
    assert "Expected room for" in str(told)
    assert "\n" not in str(told)
    assert str(out_of_memory(error, "Session 7")).startswith("Session 7: memory ran out")


def test_what_torch_itself_raises_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert out_of_memory(caught.value) is not None


@pytest.mark.parametrize("error", [RuntimeError("The size of tensor a"), ValueError("out of memory"), OSError(12, "x")])
def test_other_errors_are_not_taken_for_it(error: BaseException) -> None:
    assert out_of_memory(error) is None


class Pipe:
    """A source that has one item."""

    def __init__(self) -> None:
        self._end, self._other = os.pipe()

    def fileno(self) -> int:
        return self._end

    def attach(self, wake: Callable[[], None]) -> None:
        pass

    def read(self) -> int | None:
        return 1

    def close(self) -> None:
        os.close(self._end)
        os.close(self._other)


@pytest.mark.parametrize("way", ["run", "listen", "loop"])
@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("something else")], ids=str)
def test_it_is_said_by_whoever_does_the_work(way: str, error: Exception) -> None:
    def work(*_: Any) -> None:
        raise error

    async def on_the_loop() -> None:
        work()

    async def main() -> Exception:
        runner, pipe = Runner(), Pipe()
        with pytest.raises((SplitlmError, RuntimeError)) as caught:
            if way == "run":
                await runner.run(work)
            elif way == "listen":
                await runner.listen(pipe, work)
            else:
                await memory_told(on_the_loop())
        assert await runner.run(lambda: 5) == 5
        await asyncio.to_thread(runner.close)
        pipe.close()
        return caught.value

    raised = asyncio.run(main())
    if isinstance(error, MemoryError):
        assert str(raised).startswith("Memory ran out (MemoryError: no room)")
        assert raised.__cause__ is error  # which --debug shows
    else:
        assert raised is error


@pytest.mark.parametrize("at", [0, 3])
def test_the_uncut_model_says_it(at: int, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Stage.forward

    def failing(self: Stage, session: int, inputs: torch.Tensor, position: int, **rest: Any) -> torch.Tensor | None:
        if position == at:
            raise MemoryError("no room")
        return forward(self, session, inputs, position, **rest)

    monkeypatch.setattr(Stage, "forward", failing)
    with pytest.raises(SplitlmError, match="The uncut model: memory ran out"):
        list(Uncut(ModelFiles(tiny("llama")), loader="shard").generate([1, 2, 3], 3, prefill_chunk=8))
