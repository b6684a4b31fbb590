"""Names of nodes, and neighbours that are not the next in the ring."""

from __future__ import annotations

import asyncio
import os

import pytest

from splitlm.core.errors import PeerRefusedError
from splitlm.link.memory import pair
from splitlm.node.identity import check_place, node_name, process_of
from splitlm.wire.frame import PROTOCOL
from splitlm.wire.handshake import Claims


def test_the_process_is_in_the_name() -> None:
    assert process_of(node_name("stage")) == os.getpid()


@pytest.mark.parametrize("name", ["", "stage", "stage host:", "stage host:x1", "stage host:-5", "stage host:²"])
def test_other_names_name_no_process(name: str) -> None:
    assert process_of(name) == 0


def test_a_neighbour_out_of_order_is_refused_with_both_numbers() -> None:
    async def main() -> None:
        a = Claims(node="stage 3 (x)", version="1", protocol=PROTOCOL, place=3)
        _, b = pair(a, a)
        check_place(b, 3)
        with pytest.raises(PeerRefusedError, match=r"stage 3 \(x\).*Node 3 .*Expected node 1.*--send") as caught:
            check_place(b, 1)
        assert caught.value.exit_code == 3

    asyncio.run(main())
