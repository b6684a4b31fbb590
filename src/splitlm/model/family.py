"""What differs per architecture, as data: where a model keeps its parts, and what its head is for.

The modules themselves are the ones of transformers; nothing here computes. To add a family, add a row (and a tiny model
of it to the parity tests).
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from splitlm.core.errors import UnknownFamilyError


@dataclass(frozen=True)
class Family:
    """Names of the parts of one layout.

    Attributes:
        name: what ``--model-family`` takes.
        model_types: the ``model_type`` values of ``config.json`` that have this layout.
        base: attribute of the causal model that holds all but the head; also the prefix of its tensors' keys.
        layers: attribute of the base that lists the blocks; may be an attribute of an attribute.
        embed: attribute of the base with the token embedding (a scaled embedding scales by itself).
        table: below ``embed``, the name of the table itself.
        norm: attribute of the base with what follows the last block: the final norm, or a pooler.
        head: attribute of the whole model with the output head.
        task: what the head is for. A ``causal`` model generates; a ``classify`` model is only trained here.
        lora: modules that take LoRA adapters where peft names none for the model's type.
        block: name of the block's class where the model does not say it plainly.
        positions: attribute of the base with learned positions, added on the first stage only.
        per_block: config lists with one entry per block.
        scale: attribute of the base by which its forward multiplies whatever enters it, embedded or handed over.
        refused: config flags that this layout cannot serve.
    """

    name: str
    model_types: frozenset[str]
    base: str = "model"
    layers: str = "layers"
    embed: str = "embed_tokens"
    table: str = "weight"
    norm: str = "norm"
    head: str = "lm_head"
    positions: str | None = None
    per_block: tuple[str, ...] = ("layer_types",)
    scale: str | None = None
    refused: tuple[str, ...] = ()
    task: Literal["causal", "classify"] = "causal"
    lora: tuple[str, ...] = ("q_proj", "v_proj")
    block: str = ""

    def blocks_of(self, base: Any) -> Any:
        """The list of blocks of a base model."""
        return attrgetter(self.layers)(base)

    def set_blocks(self, base: Any, blocks: Any) -> None:
        """Give a base model another list of blocks."""
        holder, _, name = self.layers.rpartition(".")
        setattr(attrgetter(holder)(base) if holder else base, name, blocks)

    def block_prefix(self, index: int) -> str:
        """Prefix of the keys of one block's tensors."""
        return f"{self.base}.{self.layers}.{index}."

    def prefixes(self, *names: str | None) -> tuple[str, ...]:
        """Prefixes of the keys of some of the base's parts."""
        return tuple(f"{self.base}.{name}." for name in names if name)

    @property
    def embed_key(self) -> str:
        """Key of the embedding table."""
        return f"{self.base}.{self.embed}.{self.table}"

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
        refused=("add_cross_attention",),
        lora=("c_attn",),
    ),
    Family("granite", frozenset({"granite"}), scale="embedding_multiplier"),
    Family("olmo", frozenset({"olmo2", "olmo3"})),
    Family("phi3", frozenset({"phi3"}), lora=("qkv_proj",)),
    Family("smollm3", frozenset({"smollm3"}), per_block=("layer_types", "no_rope_layers")),
    Family("stablelm", frozenset({"stablelm"})),
    Family("starcoder2", frozenset({"starcoder2"})),
    Family("ministral", frozenset({"ministral"})),
    Family("cohere2", frozenset({"cohere2"})),
    Family("exaone4", frozenset({"exaone4"})),
    Family("seed_oss", frozenset({"seed_oss"})),
    Family("glm4", frozenset({"glm4"})),
    Family("arcee", frozenset({"arcee"})),
    Family(
        "bert",
        frozenset({"bert"}),
        base="bert",
        layers="encoder.layer",
        embed="embeddings",
        table="word_embeddings.weight",
        norm="pooler",
        head="classifier",
        task="classify",
        lora=("query", "value"),
        block="BertLayer",
        refused=("is_decoder", "add_cross_attention", "chunk_size_feed_forward"),
    ),
)


def find_family(model_type: str, override: str = "", where: str = "") -> Family:
    """The family of a ``model_type``, or the one that the caller names for a type that has none.

    Raises:
        UnknownFamilyError: neither is in the table, or the type has another family; the message says which.
    """
    known = ", ".join(family.name for family in FAMILIES)
    own = next((family for family in FAMILIES if model_type in family.model_types), None)
    named = next((family for family in FAMILIES if family.name == override), own)
    if override and (named is None or named.name != override):
        raise UnknownFamilyError(
            f"There is no model family {override!r}", where="--model-family", expected=f"one of {known}"
        )
    if own is not None and named is not own:
        raise UnknownFamilyError(
            f"A model of type {model_type!r} was to be taken for one of the {override} family",
            where="--model-family",
            expected=f"{own.name}, which is its own, or nothing",
        )
    if named is not None:
        return named
    types = ", ".join(sorted(t for family in FAMILIES for t in family.model_types))
    raise UnknownFamilyError(
        f"The model type {model_type!r} is in no family",
        where=where,
        expected=f"model_type to be one of {types}",
        remedy=f"If its layout is that of a known family, say which with --model-family ({known})",
    )


def check_layout(model: Any, family: Family, where: str = "") -> None:
    """Make sure that a built model has the parts which its family names, and outside its blocks no other weights.

    A model with further weights (embeddings per layer, projections between parts) needs more than the hidden states
    that one stage hands to the next; cut along this family's lines it would compute something else.

    Raises:
        UnknownFamilyError: naming the part that is not there, or the one that is too much.
    """
    base = getattr(model, family.base, None)
    parts = [(model, family.head), (base, family.embed), (base, family.norm)]
    holder, _, name = family.layers.rpartition(".")
    parts.append((getattr(base, holder, None) if holder else base, name))
    if family.positions:
        parts.append((base, family.positions))
    if base is None:
        parts.insert(0, (model, family.base))
    layout = f"the layout of the {family.name} family: {family.base}.{family.layers}, {family.base}.{family.embed}, "
    layout += f"{family.base}.{family.norm}, {family.head}"
    for owner, name in parts:
        if getattr(owner, name, None) is None:
            raise UnknownFamilyError(
                f"{type(model).__name__} has no part {name!r}",
                where=where,
                expected=layout,
                remedy="Choose another family with --model-family",
            )
    known = family.prefixes(family.layers, family.embed, family.norm, family.positions)
    for name, _ in model.named_parameters():
        if not name.startswith((*known, f"{family.head}.")):
            raise UnknownFamilyError(f"{type(model).__name__} also has {name!r}", where=where, expected=layout)
