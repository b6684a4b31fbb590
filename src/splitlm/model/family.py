"""What differs per architecture, as data: where a causal language model keeps its parts.

The modules themselves are the ones of transformers; nothing here computes. To add a family, add a row (and a tiny model
of it to the parity tests).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from splitlm.core.errors import UnknownFamilyError


@dataclass(frozen=True)
class Family:
    """Names of the parts of one layout.

    Attributes:
        name: what ``--model-family`` takes.
        model_types: the ``model_type`` values of ``config.json`` that have this layout.
        base: attribute of the causal model that holds all but the head; also the prefix of its tensors' keys.
        layers: attribute of the base that lists the blocks.
        embed: attribute of the base with the token embedding (a scaled embedding scales by itself).
        norm: attribute of the base with the final norm.
        head: attribute of the causal model with the output head.
        positions: attribute of the base with learned positions, added on the first stage only.
        per_block: config lists with one entry per block.
    """

    name: str
    model_types: frozenset[str]
    base: str = "model"
    layers: str = "layers"
    embed: str = "embed_tokens"
    norm: str = "norm"
    head: str = "lm_head"
    positions: str | None = None
    per_block: tuple[str, ...] = ("layer_types",)

    def block_prefix(self, index: int) -> str:
        """Prefix of the keys of one block's tensors."""
        return f"{self.base}.{self.layers}.{index}."

    @property
    def embed_key(self) -> str:
        """Key of the embedding table."""
        return f"{self.base}.{self.embed}.weight"

    @property
    def head_key(self) -> str:
        """Key of the head's matrix."""
        return f"{self.head}.weight"


FAMILIES: tuple[Family, ...] = (
    Family("llama", frozenset({"llama"})),
    Family("mistral", frozenset({"mistral"})),
    Family("qwen2", frozenset({"qwen2"})),
    Family("qwen3", frozenset({"qwen3"})),
    Family("gemma2", frozenset({"gemma2"})),
    Family("gemma3", frozenset({"gemma3_text"})),
    Family(
        "gpt2",
        frozenset({"gpt2"}),
        base="transformer",
        layers="h",
        embed="wte",
        norm="ln_f",
        positions="wpe",
    ),
)


def find_family(model_type: str, override: str = "", where: str = "") -> Family:
    """The family of a ``model_type``, or the one that the caller names.

    Raises:
        UnknownFamilyError: neither is in the table; the message says what was looked for.
    """
    known = ", ".join(family.name for family in FAMILIES)
    for family in FAMILIES:
        if family.name == override or (not override and model_type in family.model_types):
            return family
    if override:
        raise UnknownFamilyError(
            f"There is no model family {override!r}", where="--model-family", expected=f"one of {known}"
        )
    types = ", ".join(sorted(t for family in FAMILIES for t in family.model_types))
    raise UnknownFamilyError(
        f"The model type {model_type!r} is in no family",
        where=where,
        expected=f"model_type to be one of {types}",
        remedy=f"If its layout is that of a known family, say which with --model-family ({known})",
    )


def check_layout(model: Any, family: Family, where: str = "") -> None:
    """Make sure that a built model has the parts which its family names.

    Raises:
        UnknownFamilyError: naming the part that is not there.
    """
    base = getattr(model, family.base, None)
    parts = [(model, family.head), (base, family.layers), (base, family.embed), (base, family.norm)]
    if family.positions:
        parts.append((base, family.positions))
    if base is None:
        parts.insert(0, (model, family.base))
    for owner, name in parts:
        if getattr(owner, name, None) is None:
            raise UnknownFamilyError(
                f"{type(model).__name__} has no part {name!r}",
                where=where,
                expected=f"the layout of the {family.name} family: {family.base}.{family.layers}, "
                f"{family.base}.{family.embed}, {family.base}.{family.norm}, {family.head}",
                remedy="Choose another family with --model-family",
            )
