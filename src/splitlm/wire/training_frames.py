"""The frames of training: activations, gradients, sums of losses, and states in pieces."""

from __future__ import annotations

from typing import Literal

from splitlm.wire.spec import Header, Spec


class Forward(Header, frozen=True, array_like=True, tag=32):
    """What one part of a model hands to the next in training: hidden states ``[B, T, hidden]`` and the mask ``[B, T]``.

    Attributes:
        round: of the run.
        window: of the round.
        owner: whose microbatch it is.
        index: of the microbatch in the window.
        part: to which part of the walk it goes.
        train: False in validation: no graph is kept, and no gradient comes back.
        weight: items of the microbatch's loss.

    Labels follow as a third tensor (int64) only where the shape says that they travel.
    """

    round: int
    window: int
    owner: int
    index: int
    part: int
    weight: int
    train: bool = True


class Backward(Header, frozen=True, array_like=True, tag=33):
    """A gradient on its way back: of what part ``part`` handed on, ``[B, T, hidden]``."""

    round: int
    window: int
    owner: int
    index: int
    part: int


class Scored(Header, frozen=True, array_like=True, tag=34):
    """What the part with the loss says of one microbatch, where it is not the owner's: sums and counts alone.

    Attributes:
        loss: its sum over the items.
        items: of the loss.
        correct: of the task's metric.
        counted: items of the metric.
    """

    round: int
    window: int
    owner: int
    index: int
    loss: float
    items: int
    correct: float
    counted: int


class Piece(Header, frozen=True, array_like=True, tag=40):
    """Bytes of one tensor of a node's state, on their way to or from the aggregator: ``[n]`` uint8.

    Attributes:
        what: which state it is.
        round: of the run.
        window: of the round, for gradients.
        name: of the tensor, in the whole model.
        spec: of the whole tensor.
        offset: of the first byte.
    """

    what: Literal["update", "model", "gradient"]
    round: int
    window: int
    name: str
    spec: Spec
    offset: int


class Whole(Header, frozen=True, array_like=True, tag=41):
    """All pieces of one state were sent.

    Attributes:
        samples: that it was made from.
        count: how many tensors it has.
        digest: SHA-256 over their names and bytes, in the order in which they were sent.
    """

    what: Literal["update", "model", "gradient"]
    round: int
    window: int
    samples: int
    count: int
    digest: bytes
