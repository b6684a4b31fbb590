"""Run and fine-tune one language model cut across the machines you have."""

from __future__ import annotations

__version__ = "0.1.0"
