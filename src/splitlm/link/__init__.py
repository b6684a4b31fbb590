"""Frames in and out: channels over TCP, and over memory for tests."""
