"""Verb three: blocks and their KV move between neighbours while tokens flow."""
