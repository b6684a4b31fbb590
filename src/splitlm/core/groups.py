"""One error out of the several that a task group may raise."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import TypeVar

from splitlm.core.errors import NetworkError, PeerLostError, SplitlmError

E = TypeVar("E", bound=BaseException)
LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS})
"""What a machine answers that has no more files, processes or memory to give."""


def first_error(group: BaseExceptionGroup[SplitlmError]) -> SplitlmError:
    """The error that says most: a cause before the loss of a peer that it brought about."""
    errors = list(_leaves(group))
    return min(errors, key=lambda error: isinstance(error, PeerLostError))


def fault(group: BaseExceptionGroup[Exception]) -> SplitlmError:
    """What others are told of errors that nobody raised on purpose; who meets them raises them with their traces."""
    errors = list(_leaves(group))
    limit = next((e for e in errors if isinstance(e, OSError) and e.errno in LIMITS), None)
    if limit is not None:
        return NetworkError(
            f"A limit of the machine was reached ({limit.strerror or limit})",
            expected="room for a few dozen open files and some threads",
            remedy="Check the limits on open files, processes and memory there (ulimit -n, -u and -v)",
        )
    first = errors[0]
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
