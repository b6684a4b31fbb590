"""The base of all control messages, so that they can be told by file: a ring's, and those of training."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag_field="kind", tag=lambda name: name.lower()):
    """Base of all control messages."""
