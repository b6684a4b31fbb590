"""What makes a round whole: the manifest that names every party's files, with the size and SHA-256 of each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from splitlm.core.cut import Segment
from splitlm.core.errors import CheckpointError
from splitlm.finetune.diskfile import sha256

MANIFEST = "manifest.json"


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint belongs to.

    Attributes:
        model: hash of the model's config (``model.config.config_hash``).
        cut: the segments, in the order of the walk.
        weights: fingerprint of the weights that the run began with; empty where they were made.
        owners: how many the run has.
        workers: how many the run has.
        rank: of LoRA's adapters; 0 where all weights are trained.
    """

    model: str
    cut: tuple[Segment, ...]
    weights: str = ""
    owners: int = 1
    workers: int = 1
    rank: int = 0

    def __str__(self) -> str:
        trained = f"LoRA of rank {self.rank}" if self.rank else "all weights"
        return (
            f"model {self.model[:12]} with weights {self.weights[:12] or 'made here'} cut as "
            f"{' | '.join(map(str, self.cut))}, {self.owners} owner(s), {self.workers} worker(s), {trained}"
        )


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A round.

    Attributes:
        round: its number.
        identity: what it is a round of.
        parties: who has a part in it.
        files: of all parties, by name.
        elsewhere: those of ``files`` that lie on their parties' machines.
    """

    round: int
    identity: Identity
    parties: tuple[str, ...]
    files: dict[str, File]
    elsewhere: tuple[str, ...] = ()
    schema: Literal["splitlm-round/1"] = "splitlm-round/1"


def round_folder(run: Path, round: int) -> Path:
    """Where a round lies in a run's folder, or in a party's."""
    return run / "rounds" / f"{round:06}"


def measure(path: Path) -> File:
    """A file's size and SHA-256.

    Raises:
        OSError: it cannot be read.
    """
    return File(path.stat().st_size, sha256(path))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a round.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = folder / MANIFEST
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise damaged(path, f"The manifest cannot be read ({error})") from error


def verify(folder: Path, files: Mapping[str, File], name: str) -> None:
    """Make sure that a file of a round is as it was written.

    Raises:
        CheckpointError: it is not, or the manifest does not name it.
    """
    path, told = folder / name, files.get(name)
    if told is None or Path(name).name != name:
        raise damaged(path, "The manifest has no such file")
    try:
        size = path.stat().st_size
        if size != told.bytes:
            raise damaged(path, f"It has {size} bytes and not {told.bytes}")
        if sha256(path) != told.sha256:
            raise damaged(path, "Its SHA-256 is another one")
    except OSError as error:
        raise damaged(path, f"It cannot be read ({error.strerror})") from error


def damaged(path: Path, what: str) -> CheckpointError:
    """The paragraph of a round that is not as it was written."""
    return CheckpointError(
        what,
        where=str(path),
        expected="what the round's manifest was written with",
        remedy="Go on from an earlier round, or copy the file again",
    )
