"""Names of the engines that can run a stage; what they do is in ``model/compute``."""

from __future__ import annotations

ENGINES = ("exact", "fast", "int8", "int4")
"""transformers' modules untouched; float16 weights; and the quantised ones."""
