"""The nouns: cuts, messages, sampling settings and errors. Standard library and msgspec only; no I/O, no torch."""
