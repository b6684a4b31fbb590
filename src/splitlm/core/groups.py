"""One error out of the several that a task group may raise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from splitlm.core.errors import PeerLostError, SplitlmError

E = TypeVar("E", bound=BaseException)


def first_error(group: BaseExceptionGroup[SplitlmError]) -> SplitlmError:
    """The error that says most: a cause before the loss of a peer that it brought about."""
    errors = list(_leaves(group))
    return min(errors, key=lambda error: isinstance(error, PeerLostError))


def fault(group: BaseExceptionGroup[Exception]) -> SplitlmError:
    """What others are told of errors that nobody raised on purpose; who meets them raises them with their traces."""
    first = next(_leaves(group))
    return SplitlmError(
        f"A fault ended this node: {type(first).__name__}: {first}",
        remedy="Report it, with the trace that its log shows",
    )


def _leaves(group: BaseExceptionGroup[E]) -> Iterator[E]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
