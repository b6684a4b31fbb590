"""What a user should hear before a run that is allowed, and that gives away or promises less than it seems to."""

from __future__ import annotations

from splitlm.core.config import RunConfig

SECOND_DRAW = (
    "privacy.noise: owners draw new noise when a run is gone on with, so what was sent of a round that was broken off "
    "is sent a second time with other noise, and whoever kept both can average them"
)


def cautions(config: RunConfig, *, resumed: bool = False) -> tuple[str, ...]:
    """One sentence or two for each such setting.

    Args:
        config: of the run.
        resumed: whether an earlier run is gone on with.
    """
    found = []
    if config.fine_tune.name == "full" and config.server.owners > 1 and not config.frozen_embedding:
        found.append(
            "fine-tune.freeze-embeddings is off with several owners: the rows of the embedding that an owner's update "
            "changes are the tokens of its text, and whoever averages reads them. auto freezes the embedding"
        )
    if config.privacy.noise > 0:
        found.append(
            f"privacy.noise {config.privacy.noise:g} makes activations harder to read back; it is no guarantee of any "
            "kind, and costs accuracy"
        )
    if config.privacy.noise > 0 and resumed:
        found.append(SECOND_DRAW)
    return tuple(found)
