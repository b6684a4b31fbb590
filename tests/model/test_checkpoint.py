"""What is saved is what transformers and peft load: logits before and after, to the bit where nothing is computed."""

from __future__ import annotations

import errno
import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from splitlm.core.errors import CheckpointError, SplitlmError
from splitlm.model import checkpoint
from splitlm.model.checkpoint import merge, new_folder, save_adapter, save_full, save_tensors
from tests.tiny import tokenizer
from tests.tiny_tune import VOCAB, build

TARGETS = {
    "llama": ["q_proj", "v_proj"],
    "llama-untied": ["q_proj", "down_proj"],
    "gpt2": ["c_attn"],
    "bert": ["query", "value"],
}
IDS = (torch.arange(24).view(2, 12) * 7 + 3) % VOCAB


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = build(family, tmp_path_factory.mktemp(family))
            tokenizer().save_pretrained(made[family])  # type: ignore[attr-defined]
        return made[family]

    return get


def load(folder: Path, family: str, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    auto = AutoModelForSequenceClassification if family == "bert" else AutoModelForCausalLM
    model, info = auto.from_pretrained(str(folder), local_files_only=True, output_loading_info=True, **options)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    out: Tensor = model(input_ids=IDS).logits
    return out


def adapted(base_folder: Path, family: str) -> tuple[Any, dict[str, Tensor]]:
    """A model with an adapter whose B is not zero, and its tensors by peft's keys."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    task = "SEQ_CLS" if family == "bert" else "CAUSAL_LM"
    config = LoraConfig(
        r=4, lora_alpha=12, target_modules=TARGETS[family], task_type=task, fan_in_fan_out=family == "gpt2"
    )
    torch.manual_seed(3)
    model = get_peft_model(load(base_folder, family), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model.eval(), dict(get_peft_model_state_dict(model))


def save(folder: Path, tensors: dict[str, Tensor], family: str, base_folder: Path) -> None:
    save_adapter(
        folder,
        tensors,
        r=4,
        alpha=12,
        targets=TARGETS[family],
        task="classify" if family == "bert" else "causal",
        base_name=str(base_folder),
        modules_to_save=("classifier",) if family == "bert" else (),
        fan_in_fan_out=family == "gpt2",
    )


@pytest.mark.parametrize("family", list(TARGETS))
def test_a_full_model_comes_back_to_the_bit(family: str, base: Callable[[str], Path], tmp_path: Path) -> None:
    model = load(base(family), family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    save_full(tmp_path / "out", model.state_dict(), model.config, base(family))
    again = load(tmp_path / "out", family)
    assert torch.equal(logits(again), logits(model))
    assert not torch.equal(logits(again), logits(load(base(family), family)))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("family", "source", "saved"),
    [("bert", "BertForMaskedLM", "BertForSequenceClassification"), ("gpt2", "GPT2Model", "GPT2LMHeadModel")],
)
def test_the_config_names_the_class_that_was_trained(
    family: str, source: str, saved: str, base: Callable[[str], Path], tmp_path: Path
) -> None:
    model = load(base(family), family)
    model.config.architectures = [source]
    save_full(tmp_path / "out", model.state_dict(), model.config)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [saved]
    assert model.config.architectures == [source]


def test_a_tied_table_is_stored_once(base: Callable[[str], Path], tmp_path: Path) -> None:
    from safetensors import safe_open

    model = load(base("llama"), "llama")
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= state.keys()
    save_full(tmp_path / "out", state, model.config)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == state.keys() - {"lm_head.weight"}
    assert torch.equal(logits(load(tmp_path / "out", "llama")), logits(model))
    state["lm_head.weight"][0, 0] += 1
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.* differ"):
        save_full(tmp_path / "other", state, model.config)
    assert not (tmp_path / "other").exists()


def test_an_untied_head_stays(base: Callable[[str], Path], tmp_path: Path) -> None:
    model = load(base("llama-untied"), "llama")
    save_full(tmp_path / "out", model.state_dict(), model.config)
    assert torch.equal(load(tmp_path / "out", "llama").lm_head.weight, model.lm_head.weight)


def test_big_models_are_cut_into_files(base: Callable[[str], Path], tmp_path: Path) -> None:
    from splitlm.model.index import CheckpointIndex

    model = load(base("gpt2"), "gpt2")
    save_full(tmp_path / "out", model.state_dict(), model.config, shard_bytes=30_000)
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert torch.equal(logits(load(tmp_path / "out", "gpt2")), logits(model))
    assert "transformer.wte.weight" in CheckpointIndex(tmp_path / "out").entries


def test_the_config_says_the_element_type_of_the_tensors(base: Callable[[str], Path], tmp_path: Path) -> None:
    model = load(base("llama"), "llama")
    state = {key: tensor.to(torch.bfloat16) for key, tensor in model.state_dict().items()}
    save_full(tmp_path / "out", state, model.config)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert load(tmp_path / "out", "llama", dtype="auto").dtype == torch.bfloat16
    assert model.config.dtype == torch.float32  # the caller's config is left alone


@pytest.mark.parametrize("family", list(TARGETS))
def test_peft_loads_an_adapter(family: str, base: Callable[[str], Path], tmp_path: Path) -> None:
    from peft import PeftModel

    model, tensors = adapted(base(family), family)
    save(tmp_path / "adapter", tensors, family, base(family))
    again = PeftModel.from_pretrained(load(base(family), family), str(tmp_path / "adapter")).eval()
    assert torch.equal(logits(again), logits(model))
    assert (logits(again) - logits(load(base(family), family))).abs().max() > 1e-3
    names = sorted(path.name for path in (tmp_path / "adapter").iterdir())
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(names)


@pytest.mark.parametrize("family", list(TARGETS))
def test_a_merged_model_is_the_adapted_one(family: str, base: Callable[[str], Path], tmp_path: Path) -> None:
    model, tensors = adapted(base(family), family)
    save(tmp_path / "adapter", tensors, family, base(family))
    merge(base(family), tmp_path / "adapter", tmp_path / "merged")
    merged = load(tmp_path / "merged", family)
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-4, atol=1e-5)
    assert (logits(merged) - logits(load(base(family), family))).abs().max() > 1e-3
    assert not [key for key in merged.state_dict() if "lora" in key]
    assert (tmp_path / "merged" / "tokenizer.json").is_file()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_our_own_loader_reads_a_merged_model(family: str, base: Callable[[str], Path], tmp_path: Path) -> None:
    from splitlm.model.load import ModelFiles
    from splitlm.model.uncut import Uncut

    model, tensors = adapted(base(family), family)
    save(tmp_path / "adapter", tensors, family, base(family))
    merge(base(family), tmp_path / "adapter", tmp_path / "merged")
    uncut = Uncut(ModelFiles(tmp_path / "merged"), loader="shard")
    prompt = IDS[0].tolist()
    ((_, ours),) = uncut.generate(prompt, 1, prefill_chunk=len(prompt))
    torch.testing.assert_close(ours, logits(model)[0, -1], rtol=1e-4, atol=1e-5)


def test_a_classifier_of_another_size_merges(base: Callable[[str], Path], tmp_path: Path) -> None:
    """The base is often a plain language model, whose head has two classes or none."""
    model, tensors = adapted(base("bert"), "bert")
    plain = load(base("bert"), "bert")
    body = {key: tensor for key, tensor in plain.state_dict().items() if not key.startswith("classifier")}
    config = json.loads((base("bert") / "config.json").read_text())
    save_full(tmp_path / "base", body, plain.config)
    for name in ("id2label", "label2id"):
        config.pop(name, None)
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    save(tmp_path / "adapter", tensors, "bert", tmp_path / "base")
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    torch.testing.assert_close(logits(load(tmp_path / "merged", "bert")), logits(model), rtol=1e-4, atol=1e-5)


def test_an_adapter_of_another_model_is_refused(base: Callable[[str], Path], tmp_path: Path) -> None:
    _, tensors = adapted(base("gpt2"), "gpt2")
    save(tmp_path / "adapter", tensors, "gpt2", base("gpt2"))
    with pytest.raises(CheckpointError, match="adapter"):
        merge(base("llama"), tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_keys_that_peft_does_not_know_are_refused(tmp_path: Path) -> None:
    for key in ("model.x.lora_A.weight", "base_model.model.x.weight", "base_model.model.x.lora_A.default.weight"):
        with pytest.raises(CheckpointError, match=key):
            save_adapter(
                tmp_path / "a", {key: torch.ones(1)}, r=1, alpha=1, targets=["x"], task="causal", base_name="b"
            )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("exchange", [True, False])
def test_a_failure_leaves_the_old_one(exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    with new_folder(out) as folder:
        (folder / "config.json").write_text("old")
        (folder / "model.safetensors").touch()
    if not exchange:
        monkeypatch.setattr(checkpoint, "_exchange", lambda one, other: False)
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(SplitlmError, match=r"out: .*No space left.*Free space"), new_folder(out) as folder:
        (folder / "config.json").write_text("new")
        raise full
    assert (out / "config.json").read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["out"]
    with new_folder(out) as folder:
        (folder / "config.json").write_text("new")
    assert (out / "config.json").read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["out"]


def test_without_exchange_a_failed_rename_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    with new_folder(out) as folder:
        (folder / "config.json").write_text("old")
        (folder / "model.safetensors").touch()
    monkeypatch.setattr(checkpoint, "_exchange", lambda one, other: False)
    rename, calls = Path.rename, itertools.count()

    def failing(self: Path, target: Path) -> Path:
        if next(calls) == 1:
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(SplitlmError, match="Input/output"), new_folder(out) as folder:
        (folder / "config.json").write_text("new")
    assert (out / "config.json").read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["out"]


def test_whoever_looks_finds_one_of_the_two(tmp_path: Path) -> None:
    """A reader that never rests, while the folder is replaced again and again."""
    out, stop, missed = tmp_path / "out", threading.Event(), []
    with new_folder(out) as folder:
        (folder / "config.json").write_text("0")
        (folder / "model.safetensors").touch()

    def watch() -> None:
        while not stop.is_set():
            if not (out / "config.json").exists():
                missed.append(1)

    reader = threading.Thread(target=watch)
    reader.start()
    for i in range(100):
        with new_folder(out) as folder:
            (folder / "config.json").write_text(str(i))
            (folder / "model.safetensors").touch()
    stop.set()
    reader.join()
    assert missed == [] and (out / "config.json").read_text() == "99"


def test_tensors_that_share_memory_are_stored_each(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    table = torch.arange(6.0).view(2, 3)
    save_tensors(tmp_path / "x", {"a": table, "b": table, "t": table.T, "row": table[1], "e": torch.ones(0)})
    loaded = load_file(tmp_path / "x")
    assert torch.equal(loaded["t"], table.T) and torch.equal(loaded["row"], table[1]) and loaded["e"].shape == (0,)
    assert torch.equal(loaded["a"], loaded["b"])
