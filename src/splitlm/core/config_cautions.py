"""What a user should hear before a run that is allowed, and that gives away or promises less than it seems to."""

from __future__ import annotations

from splitlm.core.config import RunConfig


def cautions(config: RunConfig) -> tuple[str, ...]:
    """One sentence or two for each such setting."""
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
    return tuple(found)
