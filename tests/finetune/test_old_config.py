"""A file of settings of the older style runs as it stands, against a hub cache with a tiny BERT and EMOTION rows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from splitlm.core.cut import Segment
from splitlm.model.tunable import TunableFiles
from tests.cli.command import start
from tests.forks import SPAWN, mother, popen

OLD = """\
name: Split_Learning
server:
  global-round: 1
  clients:
    - 1
    - 1
  architecture: u-shape
  cut-layers: 1
  tail-blocks: 0
  model-name: Bert
  data-name: EMOTION
  model:
    Bert:
      n_block: 4
    GPT2:
      n_block: 12
    Llama:
      n_block: 16
  parameters:
    load: True
    save: True
  validation: True
  data-distribution:
    non-iid: False
    num-sample: 16
    num-label: 6
    dirichlet:
      alpha: 1
    refresh-each-round: True
  random-seed: 1
rabbit:
  address: 127.0.0.1
  username: admin
  password: admin
  virtual-host: /
log_path: .
debug_mode: True
learning:
  learning-rate: 0.00001
  weight-decay: 0.01
  batch-size: 2
  control-count: 1
  clip-grad-norm: 0.0
  u-shape:
    transport: tcp
    pinned-memory: auto
    pool-bytes: 67108864
    transport-queue-size: 32
    adaptive-weights: True
    max-inflight: 2
    microbatches-per-window: 8
    worker-max-inflight: 8
    timeout-seconds: 120
fine-tune:
  name: LoRA
  LoRA:
    r: 8
    alpha: 16
"""
WORDS = ["i", "feel", "so", "very", "sad", "glad", "loved", "angry", "afraid", "amazed", "today", "##ly"]
REVISION = "0" * 40


def cached(hub: Path, kind: str, name: str) -> Path:
    """The folder of a snapshot in a hub's cache."""
    place = hub / f"{kind}--{name.replace('/', '--')}"
    folder = place / "snapshots" / REVISION
    folder.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(REVISION)
    return folder


def tiny_bert(folder: Path, old_names: bool, classes: int) -> None:
    """As the first checkpoints were published: another task's head, ``gamma`` and ``beta``, no word of classes."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocab) + "\n")
    BertTokenizerFast(vocab=str(folder / "vocab.txt"), do_lower_case=False).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=64,
        num_labels=classes or 2,
    )
    torch.manual_seed(3)
    model = BertForSequenceClassification(config)
    for name, parameter in model.named_parameters():
        if "LayerNorm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    if not classes:
        state = {name: t for name, t in state.items() if not name.startswith("classifier.")}
        state["cls.predictions.bias"] = torch.zeros(len(vocab))
        state["cls.seq_relationship.weight"] = torch.zeros(2, 32)
    if old_names:
        renamed = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        state = {re.sub(r"LayerNorm\.(weight|bias)$", lambda m: renamed[m[0]], n): t for n, t in state.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    said = {key: value for key, value in said.items() if key not in ("id2label", "label2id", "dtype")}
    (folder / "config.json").write_text(json.dumps({**said, "architectures": ["BertForMaskedLM"]}))


def emotion(folder: Path) -> None:
    (folder / "split").mkdir()
    for split, rows in (("train", 60), ("validation", 8), ("test", 8)):
        generator = torch.Generator().manual_seed(rows)
        lines = []
        for number in range(rows):
            words = [WORDS[int(i)] for i in torch.randint(0, len(WORDS) - 1, (5,), generator=generator)]
            lines.append(json.dumps({"text": " ".join(words), "label": number % 6}))
        (folder / "split" / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


def places(home: Path) -> dict[str, str]:
    """Variables that say where the hub's cache is."""
    return {"HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home of the hub's cache, which each test fills anew; processes with its ``places`` are forked (tests/forks)."""
    folder = tmp_path_factory.mktemp("home")
    if SPAWN or sys.platform != "linux":
        yield folder
        return
    with mother(**places(folder)) as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", popen(made))
        yield folder


@pytest.mark.parametrize(
    ("old_names", "classes"), [(True, 0), (False, 3)], ids=["as published first", "a head for other labels"]
)
def test_an_older_file_runs_unchanged(old_names: bool, classes: int, home: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    hub = home / "hub"
    shutil.rmtree(hub, ignore_errors=True)
    model = cached(hub, "models", "bert-base-cased")
    tiny_bert(model, old_names, classes)
    emotion(cached(hub, "datasets", "dair-ai/emotion"))
    file = tmp_path / "config.yaml"
    file.write_text(OLD)
    words = ("train", file, "--local", "--folder", tmp_path / "run")
    with start(*words, mark=tmp_path.name, env=places(home)) as process:
        done = process.wait(120)
    assert done.code == 0, done.err
    [line] = [line for line in (done.err + done.out).splitlines() if "round 1 of 1:" in line]
    assert "samples 16" in line and "loss" in line and "accuracy" in line
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=6, ignore_mismatched_sizes=True)
    base.bert.encoder.layer = base.bert.encoder.layer[:4]
    tuned = PeftModel.from_pretrained(base, str(tmp_path / "run" / "adapter"))
    moved = {n: float(p.detach().abs().max()) for n, p in tuned.named_parameters() if "lora_B" in n}
    assert len(moved) == 2 * 4 and all(value > 0 for value in moved.values())


def test_old_names_of_norms_are_read(tmp_path: Path) -> None:
    tiny_bert(tmp_path, True, 0)
    stored = load_file(tmp_path / "model.safetensors")
    part = TunableFiles(tmp_path, classes=6).load([Segment(0, 6, embed=True, head=True)])[0]
    state = part.module.state_dict()
    for at in ("embeddings", "encoder.layer.3.output"):
        assert torch.equal(state[f"bert.{at}.LayerNorm.weight"], stored[f"bert.{at}.LayerNorm.gamma"])
        assert torch.equal(state[f"bert.{at}.LayerNorm.bias"], stored[f"bert.{at}.LayerNorm.beta"])
    assert state["classifier.weight"].shape == (6, 32)
