"""What a plan must know of a model: the planner's view of a ``ModelFiles``. No weight is read."""

from __future__ import annotations

from splitlm.core.cut import Segment
from splitlm.core.profile import Identity, ModelProfile
from splitlm.model.load import ModelFiles
from splitlm.model.sizes import ModelShape


def identity(files: ModelFiles, compute: str) -> Identity:
    """What must be equal for two measurements to be comparable."""
    return Identity(
        config_hash=files.index.config_hash(), dtype=str(files.dtype).removeprefix("torch."), compute=compute
    )


def model_profile(files: ModelFiles, name: str, compute: str) -> ModelProfile:
    """Bytes of every part.

    Args:
        name: as the user calls the model.
        compute: engine that it will run with.

    Raises:
        UnknownFamilyError: the model does not have its family's layout.
    """
    shape, n = ModelShape(files.folder, files.dtype, family=files.family.name), files.blocks
    seen: set[int] = set()
    embed = shape.size(Segment(0, 0, embed=True), seen).weight_bytes
    untied = shape.size(Segment(n, n, head=True), seen).weight_bytes
    head = shape.size(Segment(n, n, head=True), set()).weight_bytes
    windows = tuple(window - 1 if window else 0 for window in shape.windows)
    return ModelProfile(
        name=name,
        identity=identity(files, compute),
        blocks=n,
        block_bytes=max(shape.size(Segment(i, i + 1), set()).weight_bytes for i in range(n)),
        embed_bytes=embed,
        head_bytes=head,
        tied_bytes=head - untied,
        kv_bytes=shape.row_bytes,
        hidden_bytes=files.hidden * files.dtype.itemsize,
        windows=windows if any(windows) else (),
    )
