"""Verb one: generation in a ring. Sessions, their schedule, and what a stage does with a frame."""
