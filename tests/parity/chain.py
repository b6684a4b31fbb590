"""A ring without a network: the stages of a cut called one after the other, so that every cut can be tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from splitlm.check.compare import Comparison, Run, compare
from splitlm.core.cut import Cut, Segment, make_cut
from splitlm.infer.schedule import chunks
from splitlm.model.load import Loader, ModelFiles
from splitlm.model.stage import Stage, build_stages
from splitlm.model.uncut import Uncut
from tests.tiny import VOCAB, WINDOW

Step = Callable[[Stage, torch.Tensor, int, bool], torch.Tensor | None]


def forward(stage: Stage, inputs: torch.Tensor, position: int, last: bool) -> torch.Tensor | None:
    """What a relay does with a frame."""
    return stage.forward(1, inputs, position, logits=last)


def walk(stages: Sequence[Stage], prompt: Sequence[int], new: int, chunk: int, step: Step = forward) -> Run:
    """Greedy tokens and their logits through these stages."""
    for stage in stages:
        stage.close(1)
        stage.open(1)
    tokens: list[int] = []
    kept: list[torch.Tensor] = []
    work = [(list(prompt[a:b]), a) for a, b in chunks(len(prompt), chunk)]
    while len(tokens) < new:
        for rows, position in work:
            out: torch.Tensor | None = torch.tensor([rows])
            for stage in stages:
                assert out is not None
                out = step(stage, out, position, position + len(rows) >= len(prompt))
        assert out is not None
        tokens.append(int(out.argmax()))
        kept.append(out.clone())
        work = [([tokens[-1]], len(prompt) + len(tokens) - 1)]
    return Run(tokens, kept)


@dataclass
class Bench:
    """One model, with every segment of it built at most once per loader, and uncut runs made at most once."""

    folder: Path
    dtype: str = "auto"
    files: ModelFiles = field(init=False)
    _stages: dict[tuple[Loader, Segment], Stage] = field(default_factory=dict)
    _uncut: dict[Loader, Uncut] = field(default_factory=dict)
    _runs: dict[tuple[object, ...], Run] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.files = ModelFiles(self.folder, dtype=self.dtype)

    def stages(self, cut: Cut, loader: Loader = "shard") -> list[Stage]:
        """The stages of a cut, in the order of a lap."""
        for segment in cut.segments:
            if (loader, segment) not in self._stages:
                (self._stages[loader, segment],) = build_stages(self.files, [segment], loader=loader)
        return [self._stages[loader, segment] for segment in cut.segments]

    def reference(
        self, prompt: Sequence[int], new: int, chunk: int, forced: Sequence[int] = (), loader: Loader = "hf"
    ) -> Run:
        """The uncut model's run."""
        key = (tuple(prompt), new, chunk, tuple(forced), loader)
        if key not in self._runs:
            if loader not in self._uncut:
                self._uncut[loader] = Uncut(self.files, loader=loader)
            made = list(self._uncut[loader].generate(prompt, new, prefill_chunk=chunk, forced=forced or None))
            self._runs[key] = Run([token for token, _ in made], [logits.clone() for _, logits in made])
        return self._runs[key]

    def compare(
        self,
        cut: Cut | Sequence[int],
        prompt: Sequence[int],
        new: int = 8,
        chunk: int = 128,
        *,
        loader: Loader = "shard",
        ref: Loader = "hf",
        step: Step = forward,
    ) -> Comparison:
        """A cut (or its boundaries) against the uncut model."""
        cut = cut if isinstance(cut, Cut) else make_cut(self.files.blocks, cut)
        made = walk(self.stages(cut, loader), prompt, new, chunk, step)
        dtype = str(self.files.dtype).removeprefix("torch.")
        return compare(made, self.reference(prompt, new, chunk, made.tokens, ref), dtype)


def long_prompt(length: int = 2 * WINDOW + 5, seed: int = 0) -> list[int]:
    """Random tokens, more than the tiny models' sliding window holds."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=random).tolist()
