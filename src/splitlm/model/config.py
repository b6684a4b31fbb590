"""The config of a model: read through transformers, checked before anything is built from it, hashed for handshakes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from splitlm.core.errors import CheckpointError, UnknownFamilyError
from splitlm.model.border import foreign
from splitlm.model.family import Family

MAX_BLOCKS = 10_000
"""Models of today have some hundred. A damaged number must not make transformers build lists of billions."""
_SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings", "num_attention_heads")
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "intermediate_size", "n_inner", "sliding_window")
_KINDS = frozenset({"full_attention", "sliding_attention"})
_IDLE = frozenset(
    {
        "_name_or_path",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "gradient_checkpointing",
        "initializer_range",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Fields that do not change what the model computes. Nodes compare their dtype on its own."""


def read_config(folder: Path, raw: Mapping[str, Any], family: Family) -> Any:
    """The config as transformers understands it.

    Args:
        folder: the model directory.
        raw: the content of its ``config.json``.
        family: whose layout it will be built in.

    Raises:
        CheckpointError: a field is missing or wrong; the message names the file and, where it can, the field.
        UnknownFamilyError: the model does what no family here can do in parts.
    """
    where = str(folder / "config.json")
    if isinstance(raw.get("text_config"), dict):
        raise UnknownFamilyError(
            "The model has a text_config: it takes more than text",
            where=where,
            expected="a model for text alone",
            remedy="Save its language model on its own and use that directory",
        )
    if raw.get("quantization_config") is not None:
        raise CheckpointError(
            "quantization_config is set: the weights are quantized",
            where=where,
            expected="weights in float32, bfloat16 or float16",
            remedy="Use the model as it was before quantization",
        )
    for name in ("num_hidden_layers", "n_layer", "num_labels"):  # transformers makes lists of these lengths
        count = raw.get(name)
        if isinstance(count, int) and not 0 < count <= MAX_BLOCKS:
            raise _wrong(where, name, count, f"a number from 1 to {MAX_BLOCKS}")
    config = _through_transformers(folder)
    with foreign("The config cannot be used", where, f"the config of a {family.name} model"):
        _check_dtype(config, where)
        _check_sizes(config, where)
        _check_layers(config, family, where)
        _check_rope(config, where)
        for flag in family.refused:
            if getattr(config, flag, False):
                raise UnknownFamilyError(f"{flag} is set", where=where, expected=f"a {family.name} model without it")
        if family.task == "causal":
            _check_causal(config, where)
    return config


def _check_dtype(config: Any, where: str) -> None:
    dtype = getattr(config, "dtype", None)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise _wrong(where, "dtype", dtype, "the name of an element type, such as float32")


def _check_causal(config: Any, where: str) -> None:
    """Every token sees those before it and no other: what a cache of keys and values takes for granted."""
    for flag, usual in (("is_causal", True), ("use_bidirectional_attention", False)):
        value = getattr(config, flag, usual)
        if bool(value) is not usual:
            raise UnknownFamilyError(
                f"{flag} is {value}: its tokens see those that come after them",
                where=where,
                expected="a model that can write a text from left to right",
            )


def config_hash(config: Any) -> str:
    """SHA-256 over what the config says of the model's arithmetic.

    Taken over the fields that differ from their defaults, after transformers has read them: an old file and the same
    model saved again by a newer version (``torch_dtype`` for ``dtype``, ``rope_scaling`` for ``rope_parameters``, all
    defaults spelt out) have one hash. Names, versions and special token ids (the head's affair) do not
    take part.
    """
    with foreign("the config cannot be written down", str(config.name_or_path), "values that JSON knows"):
        fields = {key: value for key, value in config.to_diff_dict().items() if key not in _IDLE}
        fields["model_type"] = config.model_type
        return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def hash_of_folder(folder: Path) -> str:
    """``config_hash`` of a model directory.

    Raises:
        CheckpointError: transformers cannot read the config.
    """
    return config_hash(_through_transformers(folder))


def context_of(config: Any) -> int:
    """The longest text in tokens.

    Longrope has two sets of frequencies, and takes the second once a text is longer than
    ``original_max_position_embeddings``. A text that grew beyond it would have keys of both, so it ends there.
    """
    told = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None)
    rows = [rope, *rope.values()] if isinstance(rope, Mapping) else []
    short = [row.get("original_max_position_embeddings") for row in rows if _is_longrope(row)]
    return min([told, *(int(length) for length in short if isinstance(length, int) and length > 0)])


def _is_longrope(row: object) -> bool:
    return isinstance(row, Mapping) and row.get("rope_type") == "longrope"


def rope_types(config: Any) -> set[str]:
    """Kinds of rotary position that a config asks for (some models have one per kind of layer)."""
    return set(_rope_types(getattr(config, "rope_parameters", None)))


def _through_transformers(folder: Path) -> Any:
    where = str(folder / "config.json")
    with foreign("transformers cannot read the config", where, "a config of a model that transformers knows"):
        return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def _rope_types(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        if "rope_type" in value:
            yield str(value["rope_type"])
        for inner in value.values():
            yield from _rope_types(inner)


def _check_sizes(config: Any, where: str) -> None:
    for name in (*_SIZES, *_OPTIONAL_SIZES):
        value = getattr(config, name, None)
        if value is None and name in _OPTIONAL_SIZES:
            continue
        if type(value) is not int or value < 1:
            raise _wrong(where, name, value, "a number of at least 1")


def _check_layers(config: Any, family: Family, where: str) -> None:
    for name in family.per_block:
        values = getattr(config, name, None)
        if values is None:
            continue
        if not isinstance(values, list | tuple) or len(values) != config.num_hidden_layers:
            raise _wrong(where, name, values, f"{config.num_hidden_layers} entries, one per block")
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - _KINDS:
        raise UnknownFamilyError(
            f"layer_types has {sorted(map(str, kinds - _KINDS))}",
            where=where,
            expected=" and ".join(sorted(_KINDS)),
        )


def _check_rope(config: Any, where: str) -> None:
    """Refuse rotary frequencies that depend on what was computed before: one session would change another's."""
    if any("dynamic" in kind for kind in rope_types(config)):
        raise UnknownFamilyError(
            "rope_type is 'dynamic': its frequencies depend on the longest text that the process has seen",
            where=where,
            expected="a rope_type whose frequencies depend on the position alone (default, linear, yarn, llama3)",
            remedy="Set rope_type to linear or yarn if the model allows it",
        )


def _wrong(where: str, name: str, value: object, expected: str) -> CheckpointError:
    return CheckpointError(f"{name} is {str(value)[:80]}", where=where, expected=expected)
