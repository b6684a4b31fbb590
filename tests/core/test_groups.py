"""Of several errors of a task group, the one that explains the others."""

from __future__ import annotations

import pytest

from splitlm.core.errors import CheckpointError, PeerLostError, SplitlmError
from splitlm.core.groups import first_error

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
