"""One error out of the several that a task group may raise."""

from __future__ import annotations

from collections.abc import Iterator

from splitlm.core.errors import PeerLostError, SplitlmError


def first_error(group: BaseExceptionGroup[SplitlmError]) -> SplitlmError:
    """The error that says most: a cause before the loss of a peer that it brought about."""
    errors = list(_leaves(group))
    return min(errors, key=lambda error: isinstance(error, PeerLostError))


def _leaves(group: BaseExceptionGroup[SplitlmError]) -> Iterator[SplitlmError]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
