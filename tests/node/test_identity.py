"""Names of nodes."""

from __future__ import annotations

import os

import pytest

from splitlm.node.identity import node_name, process_of


def test_the_process_is_in_the_name() -> None:
    assert process_of(node_name("stage")) == os.getpid()


@pytest.mark.parametrize("name", ["", "stage", "stage host:", "stage host:x1", "stage host:-5", "stage host:²"])
def test_other_names_name_no_process(name: str) -> None:
    assert process_of(name) == 0
