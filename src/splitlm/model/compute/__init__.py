"""Engines: what runs a segment. ``exact`` is transformers' own modules, untouched."""
