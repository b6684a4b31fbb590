"""``splitlm check quality``: the figures are what they say, and rounding alone is told apart from the rest."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from splitlm.check.likeness import HALF, likeness, passages
from splitlm.check.passage import TEXT
from splitlm.check.quality import quality
from splitlm.model.compute.base import Job
from splitlm.model.compute.choice import choose
from splitlm.model.compute.fast import FusedEngine
from splitlm.model.compute.fused import Turn
from splitlm.model.text import TextCodec
from tests.cli.command import run
from tests.model.made import edit_tensors
from tests.tiny import CONTEXT, FAMILIES, VOCAB, build

BOUND = 5e-4
pytestmark = pytest.mark.skipif(choose("fast").name != "fast", reason="this machine has no float16 products")


def test_figures_of_made_up_logits() -> None:
    """Two tokens of four, known to the last digit."""
    true = [torch.tensor([0.0, 0.0, 0.0, 0.0]), torch.tensor([1.0, 2.0, 0.0, 0.0])]
    same = likeness("a", true, [3, 1], true)
    second = -math.log(math.exp(2) / (math.exp(1) + math.exp(2) + 2))
    assert same.perplexity == pytest.approx(math.exp((math.log(4) + second) / 2), rel=1e-6)
    assert (same.top1, same.largest, same.median) == (1.0, 0.0, 0.0)
    off = likeness("b", [true[0], torch.tensor([3.0, 2.0, 0.0, 0.5])], [3, 1], true)
    assert (off.top1, off.largest, off.median) == (0.5, 2.0, 1.0)
    assert likeness("c", [torch.tensor([0.0, 1e30])], [0], [torch.zeros(2)]).perplexity == math.inf
    with pytest.raises(ValueError, match="zip"):
        likeness("d", true[:1], [3, 1], true)


@pytest.mark.parametrize("length", [2, 3, 100, 128, 129, 1000, 5000])
@pytest.mark.parametrize("tokens", [1, 64, 65, 300])
@pytest.mark.parametrize("context", [2, 64, 8192])
def test_passages_are_spread_over_a_text(length: int, tokens: int, context: int) -> None:
    ids = list(range(length))
    found = passages(ids, tokens, context)
    most = sum(len(part.scored) for part in found)
    assert most == tokens or (most < tokens and len(found) == length // len(found[0].given + found[0].scored))
    ends = 0
    for part in found:
        whole = [*part.given, *part.scored]
        assert whole == list(range(whole[0], whole[0] + len(whole))) and part.given and part.scored
        assert len(whole) <= min(context, 2 * HALF) and part.given[0] >= ends
        ends = whole[-1] + 1
    if tokens == 300 and length == 5000:
        assert found[-1].given[0] > 0.9 * length - 2 * HALF


def test_every_passage_begins_as_texts_do_and_none_is_made_of_nothing() -> None:
    assert [p.given[0] for p in passages(range(10, 1000), 200, 100, begin=[1])] == [1] * 4
    assert all(len(p.given) + len(p.scored) <= 100 for p in passages(range(10, 1000), 200, 100, begin=[1]))
    assert passages([5], 10, 100, begin=[1])[0].scored == (5,)
    assert passages([5], 10, 100) == [] and passages([], 10, 100, begin=[1]) == []


@pytest.mark.parametrize("family", ["llama", "llama-untied", "gpt2", "gemma3", "mistral"])
def test_of_full_mantissas_rounding_explains_what_fast_changes(family: str, tiny: Callable[[str], Path]) -> None:
    result = quality(str(tiny(family)), tokens=80)
    exact, rounded, fast = result.columns
    assert (exact.top1, exact.largest, exact.median) == (1.0, 0.0, 0.0)
    assert result.rounding is not None and result.rounding.share > 0.99 and result.rounding.left == 0
    assert rounded.largest > BOUND, "or else a reference that is not rounded would do"
    assert fast.largest == pytest.approx(rounded.largest, rel=0.05)
    assert fast.perplexity == pytest.approx(rounded.perplexity, rel=1e-4)
    assert fast.top1 == pytest.approx(rounded.top1, abs=0.02)
    assert result.engines == [fast] and fast.engine == "fast" and fast.left == ()


def test_of_numbers_that_float16_holds_nothing_is_left_to_explain(tmp_path: Path) -> None:
    folder = build("llama", tmp_path)
    edit_tensors(folder, lambda tensors: {key: t.half().to(t.dtype) for key, t in tensors.items()})
    result = quality(str(folder), tokens=40)
    exact, rounded, fast = result.columns
    assert result.rounding is not None and result.rounding.share == 0
    assert rounded == replace(exact, name=rounded.name)
    assert 0 < fast.largest <= BOUND and fast.top1 == 1


@pytest.mark.parametrize("chunk", [5, 64])
def test_perplexity_is_that_of_the_whole_text_at_once(chunk: int, tiny: Callable[[str], Path]) -> None:
    """Prompt in chunks and then row by row, against one forward of transformers over each passage."""
    folder = tiny("gemma3")
    result = quality(str(folder), tokens=100, prefill_chunk=chunk)
    codec = TextCodec(folder)
    ids = codec.encode(TEXT)
    causal = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    costs = []
    for part in passages(ids[1:], 100, CONTEXT, begin=ids[:1]):
        whole = torch.tensor([[*part.given, *part.scored]])
        with torch.inference_mode():
            logits = causal(whole).logits[0].double().log_softmax(-1)
        costs += [-float(logits[i - 1, whole[0, i]]) for i in range(len(part.given), whole.shape[1])]
    assert result.scored == len(costs) == 100 and result.chunk == chunk
    assert result.columns[0].perplexity == pytest.approx(math.exp(sum(costs) / len(costs)), rel=1e-5)


def test_a_wrong_engine_shows(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Position + 1 on decode rows."""
    turn = FusedEngine._turn

    def late(self: FusedEngine, kind: str | None, jobs: Sequence[Job]) -> Turn:
        return turn(self, kind, [replace(job, position=job.position + (job.inputs.shape[1] == 1)) for job in jobs])

    monkeypatch.setattr(FusedEngine, "_turn", late)
    _, rounded, fast = quality(str(tiny("llama")), tokens=40).columns
    assert fast.largest > 10 * rounded.largest and fast.top1 < rounded.top1


def test_fewer_bits_are_told_beside_and_have_no_rounding(tiny: Callable[[str], Path]) -> None:
    result = quality(str(tiny("gpt2")), ["int8", "int4"], tokens=64)
    exact, eight, four = result.columns
    assert result.rounding is None and (eight.name, four.name) == ("int8", "int4")
    assert 0 < eight.largest < four.largest and exact.top1 > eight.top1 > four.top1


def test_a_matrix_that_cannot_be_packed_is_told(tmp_path: Path) -> None:
    """In int4 by its shape, in float16 by its largest number; and nothing goes wrong with it."""
    from transformers import AutoConfig

    from tests.model.made import make
    from tests.tiny import tokenizer

    kind, options = FAMILIES["llama"]
    assert AutoConfig.for_model(kind).model_type == "llama"
    folder = make(tmp_path, kind, {**options, "intermediate_size": 100})
    tokenizer().save_pretrained(folder)  # type: ignore[attr-defined]

    def grown(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = 131008
        return tensors

    edit_tensors(folder, grown)
    done = run("check", "quality", folder, "--compute", "fast,int4", "--tokens", "20", "--no-trace")
    assert done.code == 0, done.err
    assert "fast: 1 matrix stays in float32; of the first, it holds 131008, beyond float16" in done.out
    assert "int4: 10 matrices stay in float32; of the first, its shape is" in done.out
    done = run("check", "quality", folder, "--tokens", "20", "--no-trace", "--json")
    (fast,) = [c for c in json.loads(done.out)["columns"] if c["name"] == "fast"]
    assert len(fast["left"]) == 1 and fast["perplexity"] > 0


def test_the_verb_tells_figures_and_judges_where_it_is_told_to(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    words = ("check", "quality", tiny("gpt2"), "--tokens", "30", "--compute", "fast,int4")
    done = run(*words, "--trace-dir", tmp_path / "run")
    assert done.code == 0 and "100.00%" in done.out and "of 253,952 weights are not exact" in done.out
    kept = json.loads((tmp_path / "run" / "result.json").read_text())
    assert [c["name"] for c in kept["columns"]] == ["exact", "exact, float16 weights", "fast", "int4"]
    assert kept["scored"] == 30 and kept["inexact"] > 0.99
    (least,) = [c["top1"] for c in kept["columns"] if c["name"] == "int4"]
    assert 0 < least < 1
    assert run(*words, "--no-trace", "--min-top1", str(least)).code == 0
    poor = run(*words, "--no-trace", "--min-top1", str(least + 0.01))
    assert poor.code == 1 and "int4 agrees with exact on" in poor.paragraph and "fast" not in poor.paragraph
    assert "perplexity" in poor.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--compute", "exact"), "one of fast, int8, int4"),
        (("--compute", "fast,float7"), "'float7' is not allowed"),
        (("--min-top1", "1.5"), "a share, from 0 to 1"),
        (("--min-top1", "nan"), "a share, from 0 to 1"),
        (("--tokens", "0"), "at least 1"),
        (("--text", "nowhere.txt"), "--text: The file cannot be read"),
    ],
)
def test_what_cannot_be_measured_is_a_usage_error(
    words: tuple[str, str], says: str, tiny: Callable[[str], Path]
) -> None:
    done = run("check", "quality", tiny("llama"), "--no-trace", *words)
    assert done.code == 2 and says in done.paragraph and done.out == ""


@pytest.mark.parametrize(("data", "says"), [(b"", "too short"), (b"\xff\xfe\x00", "cannot be read")])
def test_a_text_that_is_none_is_told(data: bytes, says: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(data)
    done = run("check", "quality", tiny("gpt2"), "--text", tmp_path / "text", "--no-trace")
    assert done.code == 2 and says in done.paragraph


def test_a_text_of_ones_own_is_read(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("A fox went out. " * 40)
    one, other = (quality(str(tiny("llama")), tokens=30, text=path) for path in (tmp_path / "text", None))
    assert one.columns[0].perplexity != other.columns[0].perplexity
    assert one.scored == other.scored == 30 and one.given <= HALF + 1 <= VOCAB
