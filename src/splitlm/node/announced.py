"""A window that was announced to a party, and what it is to it once all owners have planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitlm.core import training
from splitlm.core.config import RunConfig
from splitlm.finetune.batch import Microbatch
from splitlm.finetune.engine import WindowPlan
from splitlm.finetune.party import Party
from splitlm.finetune.window import WindowScale


@dataclass(frozen=True)
class Announced:
    """A window that may be opened.

    Attributes:
        word: of the coordinator.
        batches: an owner's own microbatches for it.
        assign: the worker of each of them.
    """

    word: training.Window
    batches: Sequence[Microbatch] = ()
    assign: Sequence[int] = ()


def plan_of(open_: Announced, opened: training.Opened, party: Party, config: RunConfig) -> WindowPlan:
    """What the window is to this party, now that all shares are known."""
    by_item = config.learning.loss_weighting == "token"
    total = sum(share.items if by_item else len(share.assign) for share in opened.shares)
    order = [
        (share.owner, index)
        for share in sorted(opened.shares, key=lambda share: share.owner)
        for index, worker in enumerate(share.assign)
        if (share.owner if party.role == "owner" else worker) == party.number
    ]
    # Items of single microbatches are their owner's affair: a worker knows its share by count.
    own = sum(batch.weight for batch in open_.batches) if by_item else len(order)
    return WindowPlan(
        seq=open_.word.seq,
        round=open_.word.round,
        number=open_.word.window,
        order=order,
        scale=WindowScale(max(total, 1), own, by_item),
        batches=open_.batches,
        assign=open_.assign,
        credit=config.credit,
        inflight=config.learning.u_shape.max_inflight,
        train=open_.word.train,
    )
