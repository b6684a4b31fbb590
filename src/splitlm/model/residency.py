"""Strict residency: what must hold of a part after loading, each with an error of its own.

The checks start from the family's table and the segment, not from the modules that were built: what transformers
believes a segment to hold is compared with what it should hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from splitlm.core.cut import Segment
from splitlm.core.errors import CheckpointError, ModelError
from splitlm.model.family import Family
from splitlm.model.header import Entry

ALIGNMENT = 64
"""Bytes. Other alignments take other paths through the kernels and give other sums."""


def prefixes(family: Family, segment: Segment) -> list[str]:
    """Prefixes of the names of all tensors that a segment holds."""
    found = list(family.prefixes(family.embed, family.positions)) if segment.embed else []
    found += [family.block_prefix(i) for i in segment.blocks]
    if segment.head:
        found += [*family.prefixes(family.norm), f"{family.head}."]
    return found


def check_names(names: Iterable[str], expected: Sequence[str], where: str) -> None:
    """Every expected prefix has a tensor, and every tensor an expected prefix.

    Raises:
        ModelError: naming the first prefix without a tensor, or the first tensor without a prefix.
    """
    names = list(names)
    for prefix in expected:
        if not any(name.startswith(prefix) for name in names):
            raise ModelError(
                f"No tensor begins with {prefix!r}", where=where, expected="at least one for every part of the segment"
            )
    strays = [name for name in names if not name.startswith(tuple(expected))]
    if strays:
        raise ModelError(
            f"The tensor {strays[0]!r} belongs to no part of the segment",
            where=where,
            expected=f"names that begin with one of {', '.join(expected)}",
        )


def check_reads(reads: Sequence[str], expected: Iterable[str], where: str) -> None:
    """The tensors read are the expected ones, each once.

    Raises:
        ModelError: naming a tensor that was read without need, twice, or not at all.
    """
    wanted = sorted(expected)
    if sorted(reads) == wanted:
        return
    twice = [key for key in set(reads) if reads.count(key) > 1]
    for what, keys in (
        ("was read and belongs to another segment", set(reads) - set(wanted)),
        ("was never read", set(wanted) - set(reads)),
        ("was read twice", set(twice)),
    ):
        if keys:
            raise ModelError(f"The tensor {min(keys)!r} {what}", where=where, expected="the segment's own, each once")


def check_entry(key: str, entry: Entry, target: torch.Tensor) -> None:
    """Shape and kind of a stored tensor are those of the parameter it will fill.

    Raises:
        CheckpointError: naming tensor, file, and both shapes or element types.
    """
    if entry.shape != tuple(target.shape):
        raise CheckpointError(
            f"The tensor {key!r} has shape {list(entry.shape)}",
            where=str(entry.path),
            expected=f"shape {list(target.shape)}, as config.json says",
            remedy="Use the config.json that the weights were saved with",
        )
    if entry.dtype.is_floating_point != target.is_floating_point():
        raise CheckpointError(
            f"The tensor {key!r} has element type {entry.dtype}",
            where=str(entry.path),
            expected="floating point numbers" if target.is_floating_point() else "whole numbers",
            remedy="Use the model as it was before quantization",
        )


def check_filled(module: nn.Module, where: str) -> None:
    """Nothing is left on the meta device.

    Raises:
        CheckpointError: naming the first parameter or buffer without values.
    """
    left = [n for n, t in [*module.named_parameters(), *module.named_buffers()] if t.is_meta]
    if left:
        raise CheckpointError(
            f"{len(left)} tensors were never filled, the first is {left[0]!r}",
            where=where,
            expected="every parameter loaded and every buffer computed",
            remedy="Report it with the model's name; --loader hf may work meanwhile",
        )


def check_aligned(module: nn.Module, where: str) -> None:
    """Every parameter begins at a multiple of 64 bytes.

    Raises:
        ModelError: naming the first that does not.
    """
    for name, param in module.named_parameters():
        if param.data_ptr() % ALIGNMENT:
            raise ModelError(
                f"The parameter {name!r} lies at an address that is no multiple of {ALIGNMENT}",
                where=where,
                expected="memory from torch's own allocator",
                remedy="Report it with the versions that splitlm doctor prints",
            )


def storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Bytes by address of the storages behind tensors: what is shared counts once."""
    found: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return found
