"""Small models made on the spot, damaged on purpose, and run in parts."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from splitlm.core.cut import make_cut
from splitlm.model.load import Loader, ModelFiles
from splitlm.model.stage import Stage, build_stages
from splitlm.model.uncut import Uncut

PROMPT = list(range(3, 40))
VOCAB = 128


def make(folder: Path, kind: str, options: Mapping[str, object], dtype: torch.dtype = torch.float32) -> Path:
    """Save a seeded model whose norms, biases and scales are not neutral."""
    config = AutoConfig.for_model(
        kind,
        **copy.deepcopy(dict(options)),  # some configs write into what they are given
        vocab_size=VOCAB,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
    model.to(dtype).save_pretrained(folder)
    return folder


def edit_config(folder: Path, **fields: object) -> Path:
    """Change fields of config.json; None as a name's value deletes nothing, ``...`` does."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in fields.items():
        if value is ...:
            config.pop(name, None)
        else:
            config[name] = value
    path.write_text(json.dumps(config))
    return folder


def edit_tensors(folder: Path, change: Any) -> Path:
    """Rewrite model.safetensors with what ``change(dict)`` returns."""
    path = folder / "model.safetensors"
    tensors = {key: value.clone() for key, value in load_file(path).items()}
    save_file(change(tensors), path, metadata={"format": "pt"})
    return folder


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and tensor bytes of a safetensors file."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def put_header(path: Path, header: str | bytes, body: bytes) -> None:
    """Write a safetensors file with any header."""
    data = header.encode() if isinstance(header, str) else header
    path.write_bytes(struct.pack("<Q", len(data)) + data + body)


def chain(stages: Sequence[Stage], prompt: Sequence[int], forced: Sequence[int], chunk: int) -> list[torch.Tensor]:
    """Logits after the prompt and after each forced token, through stages called one after the other."""
    for stage in stages:
        stage.close(1)
        stage.open(1)

    def lap(rows: Sequence[int], position: int) -> torch.Tensor:
        out: torch.Tensor | None = torch.tensor([list(rows)])
        for stage in stages:
            assert out is not None
            out = stage.forward(1, out, position, logits=True)
        assert out is not None
        return out.clone()

    for at in range(0, len(prompt), chunk):
        logits = lap(prompt[at : at + chunk], at)
    kept = [logits]
    for i, token in enumerate(forced):
        kept.append(lap([token], len(prompt) + i))
    return kept


def same_as_uncut(
    folder: Path, cuts: Sequence[int], *, private: bool = False, loader: Loader = "shard", new: int = 16, **options: Any
) -> None:
    """Fail unless every step's logits are bit for bit those of transformers' own uncut model."""
    files = ModelFiles(folder, **options)
    reference = list(Uncut(files, loader="hf").generate(PROMPT, new, prefill_chunk=16))
    stages = build_stages(files, make_cut(files.blocks, cuts, private=private).segments, loader=loader)
    got = chain(stages, PROMPT, [token for token, _ in reference[:-1]], 16)
    for step, ((_, wanted), logits) in enumerate(zip(reference, got, strict=True)):
        assert torch.equal(wanted, logits), f"step {step}: {(wanted - logits).abs().max().item()}"
