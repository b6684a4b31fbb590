"""``splitlm plan``: what a cut would hold, without loading a model."""

from __future__ import annotations


def plan() -> None:
    """Print a cut."""
