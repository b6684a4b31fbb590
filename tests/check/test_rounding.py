"""``splitlm check equivalence --compute``: the reference has the engine's numbers, and nothing else of the engine's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from splitlm.check import equivalence as room
from splitlm.check.equivalence import Equivalence, equivalence
from splitlm.check.rounding import Held, Rounding, halves, held_by, round_to_half
from splitlm.core.cut import make_cut
from splitlm.core.errors import UsageError
from splitlm.core.shifts import Shift
from splitlm.model.compute.base import Job
from splitlm.model.compute.choice import choose
from splitlm.model.compute.fast import FusedEngine
from splitlm.model.compute.fused import Turn
from splitlm.model.compute.products import HALF_MAX, HalfProduct
from splitlm.model.load import ModelFiles
from splitlm.node.window import Boundary
from tests.cli.command import run
from tests.model.made import edit_tensors
from tests.tiny import BLOCKS, build

pytestmark = pytest.mark.skipif(choose("fast").name != "fast", reason="this machine has no float16 products")
TEXTS = ["A fox", "The sea is wide, and nobody knows"]


def whole(folder: Path, **more: Any) -> Equivalence:
    return equivalence(str(folder), TEXTS, max_new_tokens=8, stages=1, compute="fast", **more)


@pytest.mark.parametrize("loader", ["hf", "shard"])
@pytest.mark.parametrize("family", ["llama", "llama-untied", "gpt2", "gemma2", "gemma3", "qwen3", "mistral"])
def test_full_mantissas_agree_once_the_reference_is_rounded(
    family: str, loader: str, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = whole(tiny(family), reference=loader)
    assert result.ok and result.engines == ("fast",), [outcome.failure for outcome in result.outcomes]
    assert result.rounding is not None and result.rounding.share > 0.99 and result.rounding.left == 0
    monkeypatch.setattr(room, "round_to_half", lambda *_: Rounding())
    assert not whole(tiny(family), reference=loader).ok, "or else nothing had to be rounded"


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_a_position_too_far_turns_it_red(
    family: str, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = FusedEngine._turn

    def late(self: FusedEngine, kind: str | None, jobs: Sequence[Job]) -> Turn:
        return turn(self, kind, [replace(job, position=job.position + (job.inputs.shape[1] == 1)) for job in jobs])

    monkeypatch.setattr(FusedEngine, "_turn", late)
    result = whole(tiny(family))
    assert not result.ok
    for outcome in result.outcomes:
        bad = outcome.comparison.first_bad
        assert bad is not None and bad.index == 1, "prefill is right, and the first decode row is not"


def test_a_weight_that_is_packed_wrongly_turns_it_red(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference does not ask the engine what it holds: one number in a matrix, off by a fiftieth."""
    pack = HalfProduct.__init__

    def off(self: HalfProduct, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        weight = weight.clone()
        weight[0, 0] *= 1.02
        pack(self, weight, bias)

    monkeypatch.setattr(HalfProduct, "__init__", off)
    assert not whole(tiny("llama")).ok


def test_a_matrix_beyond_float16_stays_on_both_sides(tmp_path: Path) -> None:
    """With those that are packed together with it."""
    folder = build("llama", tmp_path)

    def grown(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors["model.layers.1.self_attn.v_proj.weight"][3, 4] = 2 * HALF_MAX
        tensors["model.layers.1.self_attn.o_proj.weight"] *= 1e-3
        return tensors

    edit_tensors(folder, grown)
    result = whole(folder)
    assert result.rounding is not None and result.rounding.left == 3
    assert result.ok, [outcome.failure for outcome in result.outcomes]


@pytest.mark.parametrize(
    ("cut", "engines", "held"),
    [
        (make_cut(BLOCKS, ()), ["fast"], Held(frozenset(range(5)), True, True)),
        (make_cut(BLOCKS, (2,)), ["fast", "fast"], Held(frozenset(range(5)), True, False)),
        (make_cut(BLOCKS, (2,)), ["exact", "fast"], Held(frozenset({2, 3, 4}), True, False)),
        (make_cut(BLOCKS, (2,)), ["fast, paced at 5 ms per block", "int8"], Held(frozenset({0, 1}), False, False)),
        (make_cut(BLOCKS, (2,), private=True), ["fast", "exact"], Held(frozenset({0, 1}), True, True)),
        (make_cut(BLOCKS, (2,), private=True), ["exact", "fast"], Held(frozenset({2, 3, 4}), False, False)),
        (make_cut(BLOCKS, ()), ["fast (linear layers only)"], Held(frozenset(range(5)), True, True, fused=False)),
        (make_cut(BLOCKS, ()), ["exact"], Held()),
    ],
)
def test_what_is_held_in_float16(cut: Any, engines: list[str], held: Held, tiny: Callable[[str], Path]) -> None:
    files = ModelFiles(tiny("llama"))
    assert held_by(files, cut, engines) == held
    assert bool(held) == any(map(halves, engines))
    assert not held_by(ModelFiles(tiny("llama-untied")), cut, engines).table
    assert not held_by(ModelFiles(tiny("llama"), dtype="bfloat16"), cut, engines).table


def test_only_what_is_held_is_rounded(tiny: Callable[[str], Path]) -> None:
    """A head that is rounded alone leaves its embedding as it is, and norms stay."""
    folder = tiny("llama")
    files = ModelFiles(folder)

    def rounded(held: Held) -> tuple[set[str], Rounding]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        before = {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}
        found = round_to_half(model, files, held)
        after = dict(model.named_parameters(remove_duplicate=False))
        changed = {name for name, p in before.items() if not torch.equal(p, after[name])}
        assert all(torch.equal(after[name], before[name].half().float()) for name in changed)
        return changed, found

    changed, found = rounded(Held(frozenset({1})))
    assert len(changed) == 7 and all(name.startswith("model.layers.1.") and "proj" in name for name in changed)
    assert set(found.by_block) == {1} and found.by_block[1] == found.inexact
    assert rounded(Held(head=True))[0] == {"lm_head.weight"}
    both, found = rounded(Held(head=True, table=True))
    assert both == {"lm_head.weight", "model.embed_tokens.weight"}
    assert found.numbers == files.vocab * files.hidden, "one table is counted once"


def test_engines_of_which_equality_cannot_be_asked(tiny: Callable[[str], Path]) -> None:
    words = ("check", "equivalence", tiny("llama"), "--no-trace", "--stages", "1")
    for engine in ("int8", "int4"):
        done = run(*words, "--compute", engine)
        assert done.code == 2 and f"splitlm check quality MODEL --compute {engine}" in done.paragraph and not done.out
    done = run(*words, "--compute", "fast", "--bit-equal")
    assert done.code == 2 and "--bit-equal" in done.paragraph


def test_the_verb_says_what_was_rounded(tiny: Callable[[str], Path]) -> None:
    done = run("check", "equivalence", tiny("llama"), "--no-trace", "--stages", "1", "--compute", "fast", "-n", "4")
    assert done.code == 0, done.err
    (told,) = [line for line in done.out.splitlines() if "rounded to float16, as" in line]
    assert "99.99% of 161,792 numbers" in told
    assert "engines: fast" in done.out and "with its weights rounded to float16 under this rule" in done.out


def test_blocks_that_change_their_engine_are_found() -> None:
    def boundary(*moves: tuple[int, int, int]) -> Boundary:
        found = [SimpleNamespace(block=b, source=s, target=t) for b, s, t in moves]
        return cast(Boundary, SimpleNamespace(moves=found))

    engines = ["fast", "exact", "exact"]
    seen = [boundary((1, 0, 1), (2, 1, 2)), boundary()]
    assert room._crossed(seen, engines) == {1: "fast to exact"}
    room._check_crossed({1: "fast to exact"}, Rounding(by_block={1: 0}))
    with pytest.raises(UsageError, match="Block 1 moved from the engine fast to exact, and float16 does not hold 7"):
        room._check_crossed({1: "fast to exact"}, Rounding(by_block={1: 7}))


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["fast", ("fast", "exact")])
def test_rings_of_processes_with_moves(compute: str | tuple[str, ...], tmp_path: Path) -> None:
    """All fast, and a block that goes from one engine to another: its numbers are those of float16."""
    folder = build("llama", tmp_path)
    if compute != "fast":
        edit_tensors(folder, lambda tensors: {key: t.half().to(t.dtype) for key, t in tensors.items()})
    shifts = (Shift(5, 1, -1),)
    ring: dict[str, Any] = {"stages": 2, "compute": compute, "window": 5, "shifts": shifts}
    result = equivalence(str(folder), TEXTS, max_new_tokens=14, **ring)
    assert result.ok and result.ring is not None and len(result.ring.done) == 1
    assert result.rounding is not None and (result.rounding.share > 0.99) == (compute == "fast")


@pytest.mark.slow
def test_a_quantised_ring_is_compared_with_itself(tiny: Callable[[str], Path]) -> None:
    ring: dict[str, Any] = {"stages": 2, "compute": "int8", "window": 5, "shifts": (Shift(5, 1, -1),)}
    result = equivalence(str(tiny("llama")), TEXTS[:1], max_new_tokens=14, baseline="noshift", **ring)
    assert result.ok and result.outcomes[0].comparison.bit_equal and result.rounding is None
