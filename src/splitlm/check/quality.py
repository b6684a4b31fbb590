"""What an engine changes: perplexity and logits over a text, against transformers' own modules in float32.

The text is not generated but fed (teacher forcing): of each passage one half as a prompt, in chunks, and the other half
row by row, as a ring does it. What is scored are the rows from which a next token would be chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from splitlm.check.equivalence import intra_op_threads
from splitlm.check.likeness import Likeness, Passage, likeness, passages
from splitlm.check.passage import TEXT
from splitlm.check.rounding import Rounding, halves, held_by, round_to_half
from splitlm.core.cut import make_cut
from splitlm.core.engines import ENGINES
from splitlm.core.errors import UsageError
from splitlm.model.compute.choice import need
from splitlm.model.load import ModelFiles
from splitlm.model.source import resolve
from splitlm.model.stage import build_stages
from splitlm.model.text import TextCodec
from splitlm.model.uncut import Uncut
from splitlm.model.whole import own_memory, whole_model

LONGEST = 4 * 2**20
"""Bytes of a text that are looked at."""


@dataclass(frozen=True)
class Quality:
    """What was found.

    Attributes:
        columns: the reference; with an engine of float16 weights, the reference with those; then each engine.
        rounding: of those weights.
        scored: tokens that were foretold; of each passage the first one by the prompt's last row, the others by rows of
            their own.
        passages: how many.
        given: tokens of a passage's prompt.
        chunk: prompt tokens per step.
    """

    columns: tuple[Likeness, ...]
    rounding: Rounding | None
    scored: int
    passages: int
    given: int
    chunk: int

    @property
    def engines(self) -> list[Likeness]:
        """The columns of engines, without the reference's."""
        return [column for column in self.columns if column.name in ENGINES[1:]]


def quality(
    model: str,
    computes: Sequence[str] = ("fast",),
    *,
    text: Path | None = None,
    tokens: int = 256,
    threads: int = 1,
    prefill_chunk: int = 32,
    family: str = "",
    say: Callable[[str], None] = lambda _: None,
) -> Quality:
    """Measure engines against ``exact`` in float32. The reference's logits are kept: 4 bytes × vocabulary per token.

    Args:
        computes: engines other than ``exact``.
        text: a file in UTF-8, of which the first 4 MiB are used; None takes a text of ours.
        tokens: to be scored.
        prefill_chunk: prompt tokens per step.

    Raises:
        UsageError: an engine that this machine lacks, or a text that cannot be read or is too short.
        ModelError: there is no such model, its files are damaged, or its logits are not finite.
    """
    for name in computes:
        if name not in ENGINES[1:]:
            raise UsageError(
                f"{name!r} is nothing to compare with exact", where="--compute", expected=" or ".join(ENGINES[1:])
            )
    chosen = {name: need(name).name for name in computes}
    words = TEXT if text is None else _read(text)
    folder = resolve(model, progress=say)
    files = ModelFiles(folder, family=family, dtype="float32")
    parts = _passages(TextCodec(folder), words, tokens, files.context)
    scored = [token for part in parts for token in part.scored]
    whole = make_cut(files.blocks, ())
    halved = any(map(halves, computes))
    columns, rounding = [], None
    with intra_op_threads(threads):
        say(f"{len(scored)} tokens through exact")
        causal = whole_model(folder, files.dtype)
        own_memory(causal)
        reference = [row.clone() for row in _rows(Uncut(files, model=causal), parts, prefill_chunk)]
        columns.append(likeness("exact", reference, scored, reference))
        if halved:
            say("the same with weights rounded to float16")
            rounding = round_to_half(causal, files, held_by(files, whole, ["fast"]))
            rows = _rows(Uncut(files, model=causal), parts, prefill_chunk)
            columns.append(likeness("exact, float16 weights", rows, scored, reference))
        del causal
        for name, engine in chosen.items():
            say(f"the same through {name}")
            (stage,) = build_stages(files, whole.segments, compute=engine)
            left = stage.packing.left if stage.packing is not None else []
            rows = _rows(Uncut(files, stage=stage), parts, prefill_chunk)
            columns.append(likeness(name, rows, scored, reference, engine=stage.engine.name, left=left))
            del stage
    return Quality(tuple(columns), rounding, len(scored), len(parts), len(parts[0].given), prefill_chunk)


def _rows(uncut: Uncut, parts: Sequence[Passage], chunk: int) -> Iterator[torch.Tensor]:
    """The logits from which each scored token is foretold."""
    for part in parts:
        made = uncut.generate(part.given, len(part.scored), prefill_chunk=chunk, forced=part.scored)
        for _, logits in made:
            yield logits.float()


def _passages(codec: TextCodec, text: str, tokens: int, context: int) -> list[Passage]:
    ids = codec.encode(text)
    begin = ids[:1] if ids[:1] == [codec.bos_id] else []
    found = passages(ids[len(begin) :], tokens, context, begin=begin)
    if not found:
        raise UsageError("The text is too short", where="--text", expected="two tokens at least")
    return found


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(LONGEST)
        # The cut may go through a character.
        return data.decode("utf-8", errors="ignore" if len(data) == LONGEST else "strict")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The file cannot be read ({error})", where="--text", expected="a text file") from error
