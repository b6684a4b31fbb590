"""Deciding which node holds what: numbers in, cuts out. Pure functions; no torch, no I/O."""
