"""Placeholder interface; see brief."""

from __future__ import annotations

import msgspec


class Claims(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of itself when it meets another; ``""`` where it does not know yet.

    Two nodes of one ring must agree on everything but ``node``.
    """

    node: str
    version: str
    protocol: int
    model: str = ""
    weights: str = ""
    tokenizer: str = ""
    dtype: str = ""
    epoch: int = 0
