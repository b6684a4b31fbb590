"""Is a ring what the uncut model is? Both run, and every logit of every token is compared.

The ring's stages are processes of their own; the reference is the whole model in this process, once the ring is gone.
By default the ring reads its weights with our loader and the reference with transformers' own, so that no loader's
mistake cancels out. Where stages hold their weights in float16, the reference is given the same numbers.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from splitlm.check.compare import Comparison, Run, compare, rule
from splitlm.check.moves import Moves
from splitlm.check.rounding import Held, Rounding, halves, held_by, round_to_half
from splitlm.core.cut import make_cut
from splitlm.core.engines import ENGINES
from splitlm.core.errors import UsageError
from splitlm.local import Generation, Ring
from splitlm.model.load import Loader, ModelFiles
from splitlm.model.runner import check_threads
from splitlm.model.stage import build_stages
from splitlm.model.text import TextCodec
from splitlm.model.uncut import Uncut
from splitlm.model.whole import own_memory, whole_model
from splitlm.node.window import Boundary

Say = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """A prompt in token ids, and a name for tables."""

    name: str
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """What came of one prompt.

    Attributes:
        text: that the ring generated.
        golden: whether it is the golden text; None where there was none.
        bits: whether bit-equal logits were asked for.
    """

    case: Case
    comparison: Comparison
    text: str
    golden: bool | None = None
    bits: bool = False

    @property
    def ok(self) -> bool:
        """Whether the prompt passed."""
        return not self.failure

    @property
    def failure(self) -> str:
        """Why it did not; empty if it did."""
        if self.comparison.failure:
            return self.comparison.failure
        if self.bits and not self.comparison.bit_equal:
            first = next(step for step in self.comparison.steps if not (step.bit_equal and step.same))
            return f"at index {first.index} the logits are not bit-equal (max |Δlogit| {self.comparison.delta:.2g})"
        return "the text is not the golden one" if self.golden is False else ""


@dataclass(frozen=True)
class Equivalence:
    """The whole check.

    Attributes:
        cut: the ring's segments in words, by node.
        dtype: in which both sides computed.
        baseline: what the ring was compared with: ``reference`` or ``noshift``.
        ring: what happened in the ring when blocks were to move; None where none were.
        engines: that its nodes ran.
        rounding: what was rounded in the reference, as the engines do it; None where they take weights as they are.
    """

    cut: tuple[str, ...]
    dtype: str
    outcomes: tuple[Outcome, ...]
    baseline: str = "reference"
    ring: Moves | None = None
    engines: tuple[str, ...] = ()
    rounding: Rounding | None = None

    @property
    def ok(self) -> bool:
        """Whether every prompt passed, and every move happened and moved what it must."""
        moved = self.ring is None or not self.ring.failure
        return bool(self.outcomes) and all(outcome.ok for outcome in self.outcomes) and moved

    @property
    def rule(self) -> str:
        """What was applied, in words."""
        return rule(self.dtype)


def equivalence(
    model: str,
    prompts: Sequence[str] = (),
    *,
    max_new_tokens: int = 32,
    sessions: int = 1,
    reference: Loader = "hf",
    threads: int = 1,
    prefill_chunk: int = 128,
    golden: Path | None = None,
    bits: bool = False,
    baseline: str = "reference",
    say: Say = lambda _: None,
    **ring: Any,
) -> Equivalence:
    """Generate greedily in a ring and without one, and compare.

    Args:
        prompts: texts; none takes a short and a long one, or with ``golden`` the empty one (BOS alone).
        max_new_tokens: tokens of each prompt; end-of-sequence tokens do not end it.
        sessions: so many prompts run in the ring at once (the given ones again where there are fewer).
        reference: loader of the uncut side.
        threads: of every stage and of the reference; another number gives other sums.
        prefill_chunk: of both sides, for the same reason.
        golden: file with the text that every prompt is to give.
        bits: let nothing pass that is not bit-equal.
        baseline: ``reference``, or ``noshift``: the same ring that moves no block, of which every bit must be the same.
        ring: what else ``Ring`` takes (stages, cuts, private, loader, dtype …).

    Raises:
        UsageError: fewer than one session, the golden text cannot be read, or an engine of which no logits or no bits
            can be those of the reference.
        SplitlmError: the ring could not be formed, or broke.
    """
    if sessions < 1:
        raise UsageError(f"{sessions} sessions", where="--sessions", expected="at least 1")
    if baseline == "reference":
        _check_engines(ring.get("compute", "exact"), bits)
    wanted = _read(golden) if golden is not None else None
    with Ring(model, threads=threads, prefill_chunk=prefill_chunk, say=say, **ring) as opened:
        files, codec = opened.files, opened.codec
        texts = list(prompts) or ([""] if golden else [])
        cases = [Case(_short(text), tuple(codec.encode(text))) for text in texts]
        cases = cases or default_cases(codec, files, prefill_chunk, max_new_tokens, max(2, sessions))
        cases += [cases[i % len(cases)] for i in range(sessions - len(cases))]
        say(f"{len(cases)} prompts through the ring, {sessions} at once")
        made = ring_runs(opened, cases, max_new_tokens, sessions)
        serving, engines = opened.cut, tuple(opened.engines)
        cut = tuple("; ".join(map(str, serving.held_by(node))) for node in range(serving.stages))
    shifts = tuple(ring.get("shifts", ()))
    moves = Moves(shifts, tuple(opened.boundaries), tuple(opened.migrations)) if shifts else None
    if baseline == "noshift":
        say("the same without a move")
        still = {key: value for key, value in ring.items() if key not in ("shifts", "trace_dir")}
        with Ring(model, threads=threads, prefill_chunk=prefill_chunk, say=say, **still) as opened:
            unmoved = ring_runs(opened, cases, max_new_tokens, sessions)
        dtype = str(files.dtype).removeprefix("torch.")
        both = zip(cases, made, unmoved, strict=True)
        outcomes = [_unmoved(case, out, other, dtype, wanted) for case, out, other in both]
        return Equivalence(cut, dtype, tuple(outcomes), baseline, moves, engines)
    say(f"the same without a ring ({reference} loader)")
    with intra_op_threads(threads):
        held, crossed = held_by(files, serving, engines), _crossed(opened.boundaries, engines)
        uncut, rounding = _reference(files, reference, replace(held, blocks=held.blocks | crossed.keys()))
        _check_crossed(crossed, rounding)
        dtype = str(files.dtype).removeprefix("torch.")
        outcomes = []
        for case, out in zip(cases, made, strict=True):
            verdict = against(uncut, case, Run(out.tokens, out.logits), max_new_tokens, prefill_chunk, dtype)
            same = None if wanted is None else out.text.strip() == wanted
            outcomes.append(Outcome(case, verdict, out.text, same, bits))
    return Equivalence(cut, dtype, tuple(outcomes), baseline, moves, engines, rounding)


def _check_engines(compute: str | Sequence[str], bits: bool) -> None:
    """See that equality can be asked of these engines."""
    named = (compute,) if isinstance(compute, str) else tuple(compute)
    packed = [name for name in named if name in ENGINES[1:]]
    for name in packed:
        if not halves(name):
            raise UsageError(
                f"The engine {name} does not compute the uncut model's logits, but some that are near",
                where="--compute",
                expected="exact or fast",
                remedy=f"How near they are tells splitlm check quality MODEL --compute {name}; --baseline noshift "
                "compares such a ring with itself",
            )
    if bits and packed:
        raise UsageError(
            f"The engine {packed[0]} sums in another order than transformers, which gives other bits",
            where="--bit-equal",
            expected="--compute exact, or --baseline noshift",
        )


def _reference(files: ModelFiles, loader: Loader, held: Held) -> tuple[Uncut, Rounding | None]:
    """The uncut model with the numbers that the ring holds."""
    if not held:
        return Uncut(files, loader=loader), None
    if loader == "shard":
        (stage,) = build_stages(files, make_cut(files.blocks, ()).segments)
        return Uncut(files, stage=stage), round_to_half(stage.part.module, files, held)
    model = whole_model(files.folder, files.dtype)
    own_memory(model)
    return Uncut(files, model=model), round_to_half(model, files, held)


def _crossed(boundaries: Sequence[Boundary], engines: Sequence[str]) -> dict[int, str]:
    """Blocks that moved between nodes of which one holds them in float16, and from what engine to what."""
    moves = [move for boundary in boundaries for move in boundary.moves]
    return {
        move.block: f"{engines[move.source]} to {engines[move.target]}"
        for move in moves
        if halves(engines[move.source]) != halves(engines[move.target])
    }


def _check_crossed(crossed: Mapping[int, str], rounding: Rounding | None) -> None:
    """A block that changed its engine in the middle of a text must have had the same numbers in both."""
    for block, engines in crossed.items():
        if rounding is not None and rounding.by_block[block]:
            raise UsageError(
                f"Block {block} moved from the engine {engines}, and float16 does not hold "
                f"{rounding.by_block[block]:,} of its numbers exactly, so that no reference has both",
                where="--compute",
                expected="one engine for all stages, or weights that float16 holds",
            )


def _unmoved(case: Case, out: Generation, other: Generation, dtype: str, wanted: str | None) -> Outcome:
    """A case of the ring against the same ring without a move."""
    verdict = compare(Run(out.tokens, out.logits), Run(other.tokens, other.logits), dtype)
    return Outcome(case, verdict, out.text, None if wanted is None else out.text.strip() == wanted, True)


def ring_runs(ring: Ring, cases: Sequence[Case], max_new_tokens: int, sessions: int) -> list[Generation]:
    """Every case through an open ring, ``sessions`` at once, with the logits of each token."""

    def one(case: Case) -> Generation:
        return ring.generate(case.prompt, max_new_tokens=max_new_tokens, logits=True, ignore_eos=True)

    if sessions == 1:
        return [one(case) for case in cases]
    with ThreadPoolExecutor(sessions) as pool:
        return list(pool.map(one, cases))


def against(
    uncut: Uncut,
    case: Case,
    ring: Run,
    max_new_tokens: int,
    prefill_chunk: int,
    dtype: str,
    eos_ids: frozenset[int] = frozenset(),
) -> Comparison:
    """Compare what a ring made of a case with the uncut model, which is fed the ring's tokens."""
    steps = list(
        uncut.generate(case.prompt, max_new_tokens, prefill_chunk=prefill_chunk, forced=ring.tokens, eos_ids=eos_ids)
    )
    return compare(ring, Run([token for token, _ in steps], [logits for _, logits in steps]), dtype)


@contextlib.contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Compute with so many threads for a while; 0 leaves the number.

    Raises:
        UsageError: no machine is asked for so many.
    """
    check_threads(count)
    before = torch.get_num_threads()
    try:
        if count:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


def default_cases(codec: TextCodec, files: ModelFiles, prefill_chunk: int, new: int, count: int = 2) -> list[Case]:
    """A short prompt, and ``count − 1`` of random tokens of which the first is longer than window and chunk.

    All fit the context with the tokens to come, as far as it has room for both.
    """
    window = getattr(files.config, "sliding_window", None) or 0
    room = max(1, files.context - new) if files.context > new else max(1, files.context // 2)
    cases = [Case("short text", tuple(codec.encode("Once upon a time"))[:room])]
    chosen = random.Random(0)
    for i in range(1, count):
        long = max(window, prefill_chunk) + prefill_chunk // 2 + 5
        length = min(room, long if i == 1 else 3 + 5 * i)
        ids = tuple(chosen.randrange(files.vocab) for _ in range(length))
        cases.append(Case(f"{length} random tokens", ids))
    return cases


def _short(text: str) -> str:
    line = " ".join(text.split())
    return (line if len(line) <= 32 else f"{line[:31]}…") or "(empty)"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The file cannot be read ({error})", where="--golden", expected="a text file") from error
