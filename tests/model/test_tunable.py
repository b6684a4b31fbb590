"""What training makes of a model's directory: weights of its own, alike whatever the cut."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from splitlm.core.cut import Segment
from splitlm.model.tunable import TunableFiles
from tests.tiny_tune import BLOCKS, CLASSES, build


def load(folder: Path, segment: Segment) -> Any:
    """One part, as a machine of its own loads it."""
    return TunableFiles(folder, seed=5, scratch=True).load([segment])[0].module


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_a_tied_head_begins_as_the_embedding_on_another_machine(family: str, tmp_path: Path) -> None:
    folder = build(family, tmp_path)
    front, last = load(folder, Segment(0, 2, embed=True)), load(folder, Segment(2, BLOCKS, head=True))
    whole = load(folder, Segment(0, BLOCKS, embed=True, head=True))
    assert front.get_input_embeddings().weight.std() > 0.01
    assert torch.equal(last.lm_head.weight, front.get_input_embeddings().weight)
    assert torch.equal(last.lm_head.weight, whole.lm_head.weight)


def test_an_untied_head_begins_on_its_own(tmp_path: Path) -> None:
    whole = load(build("llama-untied", tmp_path), Segment(0, BLOCKS, embed=True, head=True))
    assert not torch.equal(whole.lm_head.weight, whole.model.embed_tokens.weight)


def test_gpt2_begins_its_way_back_into_the_stream_smaller(tmp_path: Path) -> None:
    folder = build("gpt2", tmp_path)
    block = load(folder, Segment(2, 3)).transformer.h[0]
    whole = load(folder, Segment(0, BLOCKS, embed=True, head=True)).transformer.h[2]
    for part in ("attn", "mlp"):
        made = getattr(block, part).c_proj.weight
        assert float(made.std()) == pytest.approx(0.1 / math.sqrt(2 * BLOCKS), rel=0.15)
        assert torch.equal(made, getattr(whole, part).c_proj.weight)
        assert not getattr(block, part).c_proj.bias.any()
    assert float(block.attn.c_attn.weight.std()) == pytest.approx(0.1, rel=0.15)


def test_a_head_of_more_classes_than_the_rows_have_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An owner may lack the last class; a head that lacks one of the rows' classes is made anew, and that is told."""
    files = TunableFiles(build("bert", tmp_path), classes=CLASSES - 1)
    stored = files.index.read("classifier.weight", torch.float32)
    (part,) = files.load([Segment(0, BLOCKS, embed=True, head=True)])
    assert torch.equal(part.module.classifier.weight, stored) and stored.shape[0] == CLASSES
    assert files.config.num_labels == CLASSES and not caplog.messages
    (wider,) = TunableFiles(tmp_path, classes=CLASSES + 1).load([Segment(0, BLOCKS, embed=True, head=True)])
    assert wider.module.classifier.weight.shape[0] == CLASSES + 1
    assert "its head is of 4 classes and the rows have 5: it is made anew" in caplog.text
