"""The one border where errors of transformers, torch and safetensors become ours.

A model's files are data from elsewhere. What they can provoke in other libraries is a long list of exception classes;
all of them mean the same to a user: this file is damaged, or is not what those libraries take it for.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from splitlm.core.errors import CheckpointError, SplitlmError
from splitlm.model.runner import out_of_memory

FOREIGN: tuple[type[Exception], ...] = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""What those libraries raise when a model's files displease them."""
_CAUGHT: tuple[type[Exception], ...] = (MemoryError, *FOREIGN)


@contextlib.contextmanager
def foreign(what: str, where: str, expected: str, remedy: str = "Copy or download the model again") -> Iterator[None]:
    """Turn an error of another library into one of ours; our own pass.

    Args:
        what: what was tried, without a full stop.
        where: file or directory at fault.
        expected: what would have been right.
        remedy: what the reader can do.

    Raises:
        SplitlmError: memory ran out, which is no fault of the files.
        CheckpointError: otherwise, naming the other error's class and the beginning of its text.
    """
    try:
        yield
    except _CAUGHT as error:
        if _memory_ran_out(error):
            raise SplitlmError(
                f"{what}: memory ran out ({reason(error)})",
                where=where,
                expected="room for this stage's weights (splitlm plan shows them)",
                remedy="Use more stages, free memory, or raise the limit (ulimit -v)",
            ) from error
        raise CheckpointError(f"{what} ({reason(error)})", where=where, expected=expected, remedy=remedy) from error


def _memory_ran_out(error: Exception) -> bool:
    """Whether torch's allocators, Python's, or the system that maps a file for safetensors had nothing left."""
    if isinstance(error, OSError | SafetensorError):
        return getattr(error, "errno", None) == errno.ENOMEM or f"(os error {errno.ENOMEM})" in str(error)
    return out_of_memory(error) is not None


def reason(error: BaseException) -> str:
    """Class and text of an error in one short line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:240]}{'…' * (len(text) > 240)}".rstrip(": ")
