"""What one party in training is told by its user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from splitlm.core.config import RunConfig
from splitlm.core.shape import Role
from splitlm.finetune.objective import Objectives
from splitlm.finetune.recipe import Resolve
from splitlm.node.partylinks import LinkSettings


@dataclass(frozen=True)
class PartySettings:
    """What a party is told by its user; the rest it learns from the coordinator.

    Attributes:
        role: owner or worker.
        config: the user's own settings, for what is this machine's affair: data, and where the model lies.
        resolve: finds a model's directory.
        links: how it is reached.
        weight: of a worker, against the others.
        threads: intra-op threads; 0 leaves torch's choice.
        own_data: a file of rows that are all this owner's.
        folder: where checkpoints of this party go; None keeps none.
        dtype: of weights and arithmetic.
        device: that computes: cpu, cuda or cuda:N.
        objectives: the table to look in; None for ours.
        say: takes one line of progress.
        pace_ms: least time of a forward or a backward, for a simulated device; 0 for a real one.
    """

    role: Role
    config: RunConfig
    resolve: Resolve
    links: LinkSettings = field(default_factory=LinkSettings)
    weight: float = 1.0
    threads: int = 0
    own_data: Path | None = None
    folder: Path | None = None
    dtype: str = "float32"
    device: str = "cpu"
    objectives: Objectives | None = None
    say: Callable[[str], None] = lambda _: None
    pace_ms: float = 0.0
