"""``splitlm plan``: what a cut would hold, without loading a model."""

from __future__ import annotations

from typing import Annotated

import typer

from splitlm.cli import options as o
from splitlm.cli.console import console


def plan() -> None:
    """x"""
