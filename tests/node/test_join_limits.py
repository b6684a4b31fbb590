"""A stage started by hand that meets a limit of its machine while it serves."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import Any

import pytest

from splitlm.core.errors import NetworkError
from splitlm.model.runner import Runner
from splitlm.node.join import _Member


@pytest.mark.parametrize(("number", "kind"), [(errno.EMFILE, NetworkError), (errno.EBADF, ExceptionGroup)])
def test_it_says_so_to_its_head_and_its_user(number: int, kind: type[Exception]) -> None:
    """And what is a fault of ours keeps its traceback."""
    told: list[Any] = []

    async def full() -> None:
        raise ExceptionGroup("tasks", [OSError(number, os.strerror(number))])

    async def tell(trouble: Any) -> None:
        told.append(trouble)

    async def nothing() -> None:
        pass

    stage: Any = object.__new__(_Member)
    stage._take_part, stage._tell, stage._finish_trace = full, tell, lambda: None
    stage._close_links, stage._runner, stage._loader = nothing, Runner(), Runner()
    with pytest.raises(kind) as caught:
        asyncio.run(stage.run())
    assert len(told) == 1 and os.strerror(number) in told[0].text
    assert ("limit of the machine" in str(caught.value)) == (kind is NetworkError)
