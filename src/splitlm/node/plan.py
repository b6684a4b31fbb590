"""What every node of a ring would hold, without loading a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from splitlm.core.cut import Cut, Segment
from splitlm.model.load import ModelFiles
from splitlm.model.sizes import ModelShape
from splitlm.model.source import resolve
from splitlm.node.settings import RingSettings, choose_cut


@dataclass(frozen=True)
class StagePlan:
    """What one node would hold; see ``model.sizes.SegmentSizes`` for the sizes.

    Attributes:
        node: 0 is the head's.
        segments: in words.
        blocks: indices.
    """

    node: int
    segments: str
    blocks: tuple[int, ...]
    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_cap_bytes: int


@dataclass(frozen=True)
class Plan:
    """A cut, and what it means for each node.

    Attributes:
        model: as it was asked for.
        folder: where it lies.
        dtype: of the weights.
        context: the longest text in tokens.
        window: the longest sliding window of its blocks in tokens; None where all attend to everything.
        weights: whether the weights are there; without them the config alone was read.
        stages: one per node.
        twice_bytes: of a table that embedding and head share, where two nodes hold a copy each; else 0.
    """

    model: str
    folder: Path
    cut: Cut
    dtype: str
    context: int
    window: int | None
    weights: bool
    stages: tuple[StagePlan, ...]
    twice_bytes: int = 0

    @property
    def weight_bytes(self) -> int:
        """Of all nodes together, what two of them hold counted twice."""
        return sum(stage.weight_bytes for stage in self.stages)


def plan(
    model: str | Path,
    *,
    stages: int = 1,
    cuts: Sequence[int] | None = None,
    private: bool = False,
    tail_blocks: int = 0,
    family: str = "",
    dtype: str = "auto",
    say: Callable[[str], None] | None = None,
) -> Plan:
    """What a ring would hold where. Arguments are those of ``splitlm.Ring``; a directory with a config is enough,
    and of a hub model no weights are downloaded.

    Raises:
        CutError: the cut does not fit the model.
        ModelError: the config, or the headers of the weights, are missing or damaged.
    """
    folder = resolve(str(model), progress=say, weights=False)
    there = any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").is_file()
    files = ModelFiles(folder, family=family, dtype=dtype) if there else None
    shape = ModelShape(folder, files.dtype if files else dtype, family=family)
    asked = tuple(cuts) if cuts is not None else None
    settings = RingSettings(str(model), folder, stages, asked, private, tail_blocks)
    cut = choose_cut(files or shape, settings)
    sizes = list(zip(cut.segments, cut.nodes, shape.sizes(cut), strict=True))
    nodes = []
    for node in range(cut.stages):
        own = [(segment, size) for segment, owner, size in sizes if owner == node]
        nodes.append(
            StagePlan(
                node=node,
                segments="; ".join(str(segment) for segment, _ in own),
                blocks=tuple(i for segment, _ in own for i in segment.blocks),
                parameters=sum(size.parameters for _, size in own),
                weight_bytes=sum(size.weight_bytes for _, size in own),
                kv_bytes_per_token=sum(size.kv_bytes_per_token for _, size in own),
                kv_cap_bytes=sum(size.kv_cap_bytes for _, size in own),
            )
        )
    whole = shape.size(Segment(0, shape.blocks, embed=True, head=True), set())
    twice = sum(node.weight_bytes for node in nodes) - whole.weight_bytes
    windows = [window for window in shape.windows if window is not None]
    name = str(shape.dtype).removeprefix("torch.")
    return Plan(str(model), folder, cut, name, shape.context, max(windows, default=None), there, tuple(nodes), twice)
