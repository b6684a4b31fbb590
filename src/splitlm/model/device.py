"""Where a party computes, and the memory in which what it receives lies before it goes there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

import torch

from splitlm.core.errors import UsageError
from splitlm.model.payload import dump

Pinned = Literal["auto", "on", "off"]
Allocate = Callable[[int], Any]
"""Gives a writable buffer of so many bytes (``wire.pool``)."""
_log = logging.getLogger(__name__)


def find_device(name: str) -> torch.device:
    """The device that ``cpu``, ``cuda`` or ``cuda:1`` names.

    Raises:
        UsageError: another word, or this machine or this torch has no such device.
    """
    kind, colon, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (colon and (kind == "cpu" or not number.isdecimal())):
        raise UsageError(f"{name!r} is no device", where="--device", expected="cpu, cuda or cuda:N")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            "There is no CUDA device here, or this torch is built without CUDA",
            where="--device",
            expected="cpu on this machine",
            remedy="splitlm doctor shows the torch that is installed; its CUDA builds are on pytorch.org",
        )
    count = torch.cuda.device_count()
    if colon and int(number) >= count:
        raise UsageError(f"There is no {name}", where="--device", expected=f"cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", int(number) if colon else torch.cuda.current_device())


def receive_memory(choice: Pinned, device: torch.device, otherwise: Allocate) -> Allocate:
    """Where received bytes lie: page-locked memory, from which a GPU reads at full speed, or ordinary memory.

    Args:
        choice: ``auto`` tries once and logs a fall-back; ``on`` fails where it cannot; ``off`` never locks pages.
        device: where the party computes.
        otherwise: gives ordinary memory.

    Raises:
        UsageError: ``on``, and pages cannot be locked.
    """
    if choice == "off" or (choice == "auto" and device.type != "cuda"):
        return otherwise
    reason = "This party computes on the CPU" if device.type != "cuda" else _probe()
    if not reason:
        return _pinned
    if choice == "on":
        raise UsageError(
            f"Page-locked memory cannot be had: {reason}",
            where="learning.u-shape.pinned-memory",
            expected="a party with --device cuda that may lock pages (ulimit -l)",
            remedy="auto falls back to pageable memory, off never asks",
        )
    _log.warning("Pageable memory is used: %s", reason)
    return otherwise


def _probe() -> str:
    """Why pages cannot be locked; empty where they can."""
    try:
        _pinned(4096)
    except RuntimeError as error:
        return " ".join(str(error).split())[:200]
    return ""


def _pinned(nbytes: int) -> memoryview:
    return dump(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))[1]
