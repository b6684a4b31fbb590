"""The shapes of training, as a table: which role holds which part, where the loss is, what travels, who steps when."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import msgspec

from splitlm.core.cut import Segment
from splitlm.core.errors import CutError, UsageError

Role = Literal["owner", "worker"]
"""``owner``: has the data, and as many of them as the first of ``clients``. ``worker``: computes for all owners."""
Steps = Literal["window", "batch"]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """One row.

    A microbatch walks the ``places`` in order, and its gradient walks them back.

    Attributes:
        name: what ``server.architecture`` takes.
        places: the role that holds each part of the model, from the embedding to the head.
        labels_travel: whether the part with the loss is not where the labels are.
        agreed: whether all parties step together, after a barrier at each window's end.
        steps: when each role takes an optimizer step where nothing is agreed: at the end of its window of
            ``control-count`` microbatches, or after every one.
        max_workers: how many workers there may be; 0 for any number.
    """

    name: str
    places: tuple[Role, ...]
    labels_travel: bool
    agreed: bool
    steps: dict[Role, Steps]
    max_workers: int = 0

    @property
    def loss(self) -> Role:
        """The role that computes the loss."""
        return self.places[-1]

    def parts_of(self, role: Role) -> tuple[int, ...]:
        """The parts that a role holds, by their place in the walk."""
        return tuple(i for i, place in enumerate(self.places) if place == role)


SHAPES: tuple[Shape, ...] = (
    Shape(
        name="u-shape",
        places=("owner", "worker", "owner"),
        labels_travel=False,
        agreed=True,
        steps={"owner": "window", "worker": "window"},
    ),
    Shape(
        name="two-stage",
        places=("owner", "worker"),
        labels_travel=True,
        agreed=False,
        steps={"owner": "window", "worker": "batch"},
        max_workers=1,
    ),
)


def find_shape(name: str, where: str = "server.architecture") -> Shape:
    """A shape by its name; ``split`` is an older name of ``two-stage``.

    Raises:
        UsageError: there is no such shape.
    """
    wanted = "two-stage" if name == "split" else name
    for shape in SHAPES:
        if shape.name == wanted:
            return shape
    raise UsageError(
        f"There is no shape {name!r}", where=where, expected="one of " + ", ".join(shape.name for shape in SHAPES)
    )


def cut_for(shape: Shape, blocks: int, cut_layers: int, tail_blocks: int) -> tuple[Segment, ...]:
    """The segment of each part of a shape, in the order of the walk.

    Args:
        blocks: number of blocks of the model.
        cut_layers: blocks of the first part.
        tail_blocks: blocks of the last part, where the owner holds it; elsewhere it takes all that are left.

    Raises:
        CutError: a worker would hold no block.
    """
    last = len(shape.places) - 1
    ends = [blocks] if last == 1 else [blocks - tail_blocks, blocks]
    if last == 1:
        tail_blocks = 0
    bounds = [0, cut_layers, *ends]
    if cut_layers < 0 or tail_blocks < 0 or cut_layers >= blocks - tail_blocks:
        raise CutError(
            f"cut-layers {cut_layers} and tail-blocks {tail_blocks} leave no block of {blocks} to the workers",
            where="server",
            expected=f"cut-layers + tail-blocks of 0 to {blocks - 1}",
            remedy="Take fewer, or a model with more blocks",
        )
    return tuple(Segment(begin, end, embed=i == 0, head=i == last) for i, (begin, end) in enumerate(pairwise(bounds)))
