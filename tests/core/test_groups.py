"""Of several errors of a task group, the one that explains the others."""

from __future__ import annotations

import errno
import os

import pytest

from splitlm.core.errors import CheckpointError, NetworkError, PeerLostError, SplitlmError
from splitlm.core.groups import fault, first_error

LOST = PeerLostError("Stage 2 is gone")
CAUSE = CheckpointError("The file is cut short")


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([LOST], LOST),
        ([LOST, CAUSE], CAUSE),
        ([CAUSE, LOST], CAUSE),
        ([LOST, ExceptionGroup("inner", [LOST, CAUSE])], CAUSE),
        ([ExceptionGroup("inner", [LOST])], LOST),
    ],
)
def test_a_cause_goes_before_the_loss_it_brought_about(
    errors: list[SplitlmError | ExceptionGroup[SplitlmError]], expected: SplitlmError
) -> None:
    assert first_error(ExceptionGroup("outer", errors)) is expected


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN])
def test_a_limit_of_the_machine_is_no_fault_of_ours(number: int) -> None:
    """Also where it is one of several errors, and was not the first."""
    inner = ExceptionGroup("inner", [OSError(number, os.strerror(number))])
    told = fault(ExceptionGroup("outer", [KeyError("x"), inner]))
    assert isinstance(told, NetworkError) and told.exit_code == 3
    assert os.strerror(number) in str(told) and "Check the limits" in str(told) and "Report" not in str(told)


@pytest.mark.parametrize("error", [KeyError("x"), OSError(errno.EBADF, "bad"), OSError("no number")])
def test_any_other_error_is_a_fault_to_report(error: Exception) -> None:
    told = fault(ExceptionGroup("outer", [error]))
    assert told.exit_code == 1
    assert "A fault ended this node" in str(told) and "Report it" in str(told)
