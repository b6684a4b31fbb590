"""What training reads: one example as token ids, and several of them padded into a microbatch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from splitlm.core.errors import UsageError

IGNORED = -100
"""A label that the loss passes over, as torch and transformers have it."""
PAD = 0
"""The id under the padding. Any id would do: the mask hides it. It is never EOS, which also occurs as a real token."""


@dataclass(frozen=True)
class Example:
    """One row of the data, tokenised.

    Attributes:
        ids: token ids, one at least.
        labels: one class id; or, for a token loss, one label per id, ``IGNORED`` where there is none.
        weight: items of the loss in it.
    """

    ids: tuple[int, ...]
    labels: int | tuple[int, ...]
    weight: int


@dataclass(frozen=True, eq=False)
class Microbatch:
    """Examples that go through the model together, padded on the right to the longest.

    Attributes:
        index: its place in the owner's epoch, from 0.
        ids: [B, T] int64.
        mask: [B, T] uint8, 1 where there is a token.
        labels: [B] int64 class ids, or [B, T] int64 token labels, ``IGNORED`` where there is none; not shifted.
        samples: B.
        weight: items in the loss: samples for classification, predicted tokens (after the shift) for a language model.
        padded: B · T, the tokens that are computed.

    Raises:
        UsageError: no sample, a sample without a token, or shapes or dtypes that do not belong together.
    """

    index: int
    ids: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor
    samples: int
    weight: int
    padded: int

    def __post_init__(self) -> None:
        where = f"microbatch {self.index}"
        if self.ids.dim() != 2 or self.ids.numel() == 0:
            raise UsageError(
                f"a batch of shape {tuple(self.ids.shape)} has no token",
                where=where,
                expected="[samples, tokens] with one of each at least",
            )
        if self.mask.shape != self.ids.shape or self.labels.shape not in (self.ids.shape, self.ids.shape[:1]):
            raise UsageError(
                f"ids are {tuple(self.ids.shape)}, the mask {tuple(self.mask.shape)}, "
                f"the labels {tuple(self.labels.shape)}",
                where=where,
                expected="a mask of the ids' shape, and one label per sample or per token",
            )
        kinds = (self.ids.dtype, self.mask.dtype, self.labels.dtype)
        if kinds != (torch.int64, torch.uint8, torch.int64):
            raise UsageError(
                f"ids, mask and labels are {', '.join(map(str, kinds))}", where=where, expected="int64, uint8 and int64"
            )
        empty = (self.mask.sum(dim=1) == 0).nonzero().flatten().tolist()
        if empty:
            raise UsageError(
                f"sample {empty[0]} is padding only",
                where=where,
                expected="a token at least in every sample",
                remedy="Leave rows without text out of the data",
            )
        if (self.samples, self.padded) != (self.ids.shape[0], self.ids.numel()):
            raise UsageError(
                f"samples {self.samples} and padded {self.padded} are not those of the ids",
                where=where,
                expected=f"{self.ids.shape[0]} and {self.ids.numel()}",
            )
