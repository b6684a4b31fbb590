"""What other libraries raise over a model: the files' fault, or that memory ran out."""

from __future__ import annotations

import errno

import pytest
import torch
from safetensors import SafetensorError

from splitlm.core.errors import CheckpointError, CutError, SplitlmError
from splitlm.model.border import FOREIGN, foreign

MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    SafetensorError("Error while serializing: I/O error: Cannot allocate memory (os error 12)"),
]
DAMAGE = [
    RuntimeError("size mismatch for weight"),
    OSError(errno.EIO, "Input/output error"),
    SafetensorError("InvalidHeaderDeserialization"),
    ValueError("out of memory"),
    KeyError("rope_theta"),
]


def raised(error: Exception) -> SplitlmError:
    with pytest.raises(SplitlmError) as caught, foreign("The block cannot be built", "/m", "a whole file"):
        raise error
    assert caught.value.__cause__ is error and type(error).__name__ in str(caught.value)
    return caught.value


@pytest.mark.parametrize("error", MEMORY, ids=repr)
def test_memory_that_ran_out_is_no_damage_and_downloading_again_is_no_remedy(error: Exception) -> None:
    told = raised(error)
    assert type(told) is SplitlmError
    assert str(told).startswith("/m: The block cannot be built: memory ran out (")
    assert "more stages" in told.remedy and "ownload" not in str(told)


def test_what_torch_itself_raises_is_known() -> None:
    with pytest.raises(SplitlmError, match="memory ran out") as caught, foreign("x", "/m", "y"):
        torch.empty(2**50)
    assert type(caught.value) is SplitlmError


@pytest.mark.parametrize("error", [*DAMAGE, *(kind("x") for kind in FOREIGN)], ids=repr)
def test_damage_is_the_files_fault(error: Exception) -> None:
    told = raised(error)
    assert type(told) is CheckpointError
    assert told.expected == "a whole file" and "ownload" in told.remedy


def test_an_error_of_ours_passes() -> None:
    ours = CutError("No")
    with pytest.raises(CutError) as caught, foreign("x", "/m", "y"):
        raise ours
    assert caught.value is ours
