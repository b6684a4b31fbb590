"""Checks that a user can run: is a ring what the uncut model is?"""
