"""Loading segments of a model: only the parts asked for exist, and only their tensors are read.

``--loader shard`` (default) builds on the meta device and reads its own tensors. ``--loader hf`` lets transformers load
everything and then drops the rest: slower and larger, but independent, so that one loader's mistake cannot hide.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from splitlm.core.cut import Segment
from splitlm.core.errors import CheckpointError, UnknownFamilyError
from splitlm.model import residency
from splitlm.model.border import foreign
from splitlm.model.compute.packing import Packing
from splitlm.model.config import context_of, read_config
from splitlm.model.family import Family, check_layout, find_family
from splitlm.model.index import CheckpointIndex
from splitlm.model.kinds import DTYPES as DTYPES
from splitlm.model.kinds import element_type, sliding_windows
from splitlm.model.part import Part
from splitlm.model.skeleton import (
    BlockFactory,
    block_factory,
    build_skeleton,
    check_walk,
    compute_buffers,
    leave_out,
    set_blocks,
)
from splitlm.model.whole import own_memory, whole_model

Loader = Literal["shard", "hf"]
Keys = tuple[str, dict[str, str]]
"""Prefix of a module's names in the whole model, and the checkpoint's key of each of its tensors."""
BLOCK_BYTES = 4_000_000
"""What a decode step of a block costs beyond its weights (norms, rotary, attention, seven products to start), as bytes.

Measured with one thread: 0.36 ms for a block of almost no weights, at 10 GB/s. Reading alone would put SmolLM2-135M's
head at 8 blocks; it takes 5.7 to 6.6 of them, and this gives 6.2.
"""


class ModelFiles:
    """One model directory, opened once per process: its config, family and index. Holds no weights.

    Attributes:
        built: the index of every block built so far, in order.

    Args:
        folder: a model directory.
        family: name of a family, where its config does not say.
        dtype: ``auto`` (the checkpoint's own) or a torch element type by name.

    Raises:
        ModelMissingError: a file is not there.
        CheckpointError: a file is damaged, or config and tensors do not agree.
        UnknownFamilyError: the model is of a kind that cannot be cut here.
        UsageError: ``dtype`` is unknown.
    """

    tasks: tuple[str, ...] = ("causal",)
    """What the heads of models may be for that are opened so."""

    def __init__(self, folder: Path, *, family: str = "", dtype: str = "auto") -> None:
        self.folder = folder
        self._where = str(folder / "config.json")
        self.index = self._open(folder)
        self.family: Family = find_family(str(self.index.config.get("model_type")), family, self._where)
        self._named = bool(family)
        if self.family.task not in self.tasks:
            raise UnknownFamilyError(
                f"A model of the {self.family.name} family generates no text",
                where=self._where,
                expected="a causal language model",
                remedy="It can be fine-tuned: see splitlm train",
            )
        self.config = self._configured()
        self.blocks = int(self.config.num_hidden_layers)
        self.hidden = int(self.config.hidden_size)
        self.vocab = int(self.config.vocab_size)
        self.context = context_of(self.config)
        self.tied = self.family.task == "causal" and bool(self.config.tie_word_embeddings)
        self.dtype = element_type(dtype, self.index, self.config)
        self.built: list[int] = []
        plain = f"{self.family.base}."
        # Some published checkpoints keep the base model's keys without its prefix (GPT-2's does).
        self._strip = "" if any(key.startswith(plain) for key in self.index.entries) else plain
        self._check_blocks()
        self.windows = sliding_windows(self.config, self.blocks, self._where)
        self._make: BlockFactory | None = None

    def _open(self, folder: Path) -> CheckpointIndex:
        return CheckpointIndex(folder)

    def _configured(self) -> Any:
        return read_config(self.folder, self.index.config, self.family)

    @property
    def head_cost(self) -> float:
        """What the head costs per token, in blocks of this model: bytes read, and what each block costs beside.

        Bytes are those in memory: of ``dtype``, whatever the checkpoint stores.
        """
        prefix = self.key(self.family.block_prefix(0))
        entries, size = self.index.entries, self.dtype.itemsize
        # GPT-2 as published stores its causal mask beside the weights; it has four dimensions, and is not read.
        weights = (e.shape for key, e in entries.items() if key.startswith(prefix) and len(e.shape) <= 2)
        block = size * sum(map(math.prod, weights))
        head = entries.get(self.key(self.family.head_key))
        return size * math.prod(head.shape) / (block + BLOCK_BYTES) if head is not None and block else 0.0

    @property
    def kv_heads(self) -> tuple[int, int]:
        """KV heads of every block, and the width of each."""
        heads = int(self.config.num_attention_heads)
        own = getattr(self.config, "num_key_value_heads", None) or heads
        return int(own), int(getattr(self.config, "head_dim", None) or self.hidden // heads)

    def _check_blocks(self) -> None:
        """As many blocks are stored as the config says."""
        prefix = self.key(f"{self.family.base}.{self.family.layers}.")
        heads = {key.removeprefix(prefix).split(".", 1)[0] for key in self.index.entries if key.startswith(prefix)}
        stored = {int(head) for head in heads if head.isascii() and head.isdigit() and len(head) < 6}
        if stored != set(range(self.blocks)):
            missing = sorted(set(range(self.blocks)) - stored)
            raise CheckpointError(
                f"num_hidden_layers is {self.blocks} and the tensors are those of {len(stored)} blocks",
                where=self._where,
                expected=f"tensors {prefix}{missing[0] if missing else self.blocks - 1}.…"
                + ("" if missing else " and no further block"),
                remedy="Use the config.json that the weights were saved with"
                + (", or choose another family with --model-family" if self._named else ""),
            )

    def key(self, name: str) -> str:
        """The checkpoint's key of a parameter of the causal model."""
        if self.tied and name == self.family.head_key:
            name = self.family.embed_key
        return name.removeprefix(self._strip) if self._strip else name

    def load(self, segments: Sequence[Segment], loader: Loader = "shard", packing: Packing | None = None) -> list[Part]:
        """The modules of these segments, in order; a table that two of them need is held once.

        Args:
            packing: packs each block as soon as it is read, and the head.

        Raises:
            CheckpointError: a tensor is missing, of another shape or element type, or its file is truncated.
            ModelError: a tensor was read that no segment holds, or a part of one has no tensor.
            UnknownFamilyError: the model does not have its family's layout.
        """
        build = {"shard": self._load_shard, "hf": self._load_whole}[loader]
        if self.tied and any(segment.head for segment in segments):
            self._check_tied()
        shared: dict[str, torch.Tensor] = {}
        parts = [build(segment, shared, packing) for segment in segments]
        if packing is not None and self.tied:
            tables = [part.module for part in parts if part.segment.embed]
            heads = [part.module for part in parts if part.segment.head]
            for table, head in zip(tables, heads, strict=False):
                packing.tied(table, head)
        for part in parts:
            residency.check_filled(part.module, str(self.folder))
            residency.check_aligned(part.module, str(self.folder))
            part.module.requires_grad_(False)
        return parts

    def in_page_cache(self, block: int) -> bool | None:
        """Whether a block's tensors can be read without the disk; None where the system does not say."""
        prefix = self.key(self.family.block_prefix(block))
        found = [self.index.cached(key) for key in self.index.entries if key.startswith(prefix)]
        return None if not found or None in found else all(found)

    def load_blocks(
        self,
        indices: Sequence[int],
        timings: dict[str, float] | None = None,
        packing: Packing | None = None,
        base: Any = None,
    ) -> list[nn.Module]:
        """Blocks of the model, each built afresh, weights loaded; nothing here keeps them alive.

        Args:
            timings: to which the milliseconds of ``construct``, ``read`` and ``pack`` are added.
            packing: packs each block as soon as it is read.
            base: the base model that the blocks are for, where they are packed.

        Raises:
            CheckpointError: a tensor is missing or damaged, or a block has a buffer that no file holds.
        """
        spent = timings if timings is not None else {}
        if self._make is None:
            skeleton = build_skeleton(self.config, self.family, self.dtype, str(self.folder))
            self._make = block_factory(skeleton, self.config, self.family, self.dtype, str(self.folder))
        blocks = []
        for i in indices:
            started = time.perf_counter()
            block = self._built(self._make, i)
            built = time.perf_counter()
            self._fill(block, self._keys(block, self.family.block_prefix(i)), {})
            residency.check_filled(block, str(self.folder))
            read = time.perf_counter()
            if packing is not None:
                block = packing.block(block, base)
            done = time.perf_counter()
            for what, seconds in (("construct", built - started), ("read", read - built), ("pack", done - read)):
                spent[what] = spent.get(what, 0.0) + seconds * 1e3
            blocks.append(block)
        return blocks

    def _load_shard(self, segment: Segment, shared: dict[str, torch.Tensor], packing: Packing | None) -> Part:
        where, before, held = str(self.folder), len(self.index.reads), set(shared)
        started = time.perf_counter()
        model = build_skeleton(self.config, self.family, self.dtype, where)
        self._make = make = block_factory(model, self.config, self.family, self.dtype, where)
        leave_out(model, self.family, segment, self.dtype)
        blocks = [self._built(make, i) for i in segment.blocks]
        keys = [self._keys(model, "")]
        keys += [self._keys(b, self.family.block_prefix(i)) for i, b in zip(segment.blocks, blocks, strict=True)]
        names = {prefix + local: key for prefix, of in keys for local, key in of.items()}
        residency.check_names(names, residency.prefixes(self.family, segment), where)
        # After the shapes are known to be right: a wrong head size asks for gigabytes of rotary frequencies.
        # Before the weights: a module's parameters are initialised along with its buffers.
        compute_buffers(model, where)
        self._check_walk(model, segment)
        built = time.perf_counter()
        read_s = self._fill(model, keys[0], shared)
        pack_ms = packing.ms if packing is not None else 0.0
        for place, of in enumerate(keys[1:]):
            read_s += self._fill(blocks[place], of, shared)
            if packing is not None:
                blocks[place] = packing.block(blocks[place], getattr(model, self.family.base))
        if packing is not None and segment.head:
            packing.head(model)
        pack_s = (packing.ms - pack_ms) / 1e3 if packing is not None else 0.0
        set_blocks(model, self.family, segment, blocks, self.config)
        stored = {key for key in names.values() if not self.is_fresh(key)}
        residency.check_reads(self.index.reads[before:], stored - held, where)
        done = time.perf_counter()
        rest = done - built - read_s - pack_s
        timings = {"construct": built - started, "read": read_s, "assign": rest, "pack": pack_s}
        return Part(segment, model, self._windows_of(segment), {k: v * 1e3 for k, v in timings.items()})

    def _built(self, make: BlockFactory, index: int) -> nn.Module:
        self.built.append(index)
        return make(index)

    def _keys(self, module: nn.Module, prefix: str) -> Keys:
        """The checkpoint's key of every tensor that a meta module lacks, each found and of the right shape."""
        found: dict[str, str] = {}
        for local, target in module.state_dict(keep_vars=True).items():
            found[local] = key = self.key(prefix + local)
            if self.is_fresh(key):
                continue
            residency.check_entry(key, self.index.entry(key), target)
        return prefix, found

    def _fill(self, module: nn.Module, keys: Keys, shared: dict[str, torch.Tensor]) -> float:
        """Load the tensors of a meta module, one by one; the seconds spent on reading."""
        read_s, table = 0.0, self.key(self.family.embed_key)
        state: dict[str, torch.Tensor] = {}
        targets = module.state_dict(keep_vars=True)
        for local, key in keys[1].items():
            tensor = shared.get(key)
            if tensor is None and self.is_fresh(key):
                tensor = self._made(module, keys[0], local)
            if tensor is None:
                before = time.perf_counter()
                tensor = self.index.read(key, self.dtype if targets[local].is_floating_point() else None)
                read_s += time.perf_counter() - before
            if self.tied and key == table:
                shared[key] = tensor
            state[local] = tensor
        with foreign("The tensors do not fit the model", str(self.folder), "weights that agree with config.json"):
            module.load_state_dict(state, assign=True, strict=True)
        return read_s

    def is_fresh(self, _key: str) -> bool:
        """Whether a tensor is made here and not read."""
        return False

    def _made(self, _module: nn.Module, _prefix: str, _local: str) -> torch.Tensor | None:
        """A tensor that is made here; None for one that is read."""
        return None

    def _load_whole(self, segment: Segment, shared: dict[str, torch.Tensor], packing: Packing | None) -> Part:
        started = time.perf_counter()
        model = whole_model(self.folder, self.dtype)
        check_layout(model, self.family, str(self.folder))
        read = time.perf_counter()
        base = getattr(model, self.family.base)
        kept = list(self.family.blocks_of(base))[segment.begin : segment.end]
        leave_out(model, self.family, segment, self.dtype)
        self._check_walk(model, segment)
        set_blocks(model, self.family, segment, kept, self.config)
        own_memory(model)
        if self.tied and (segment.embed or segment.head):
            holder = getattr(base, self.family.embed) if segment.embed else getattr(model, self.family.head)
            key = self.key(self.family.embed_key)
            holder.weight = nn.Parameter(shared.setdefault(key, holder.weight.detach()), False)
        done = time.perf_counter()
        timings = {"construct": 0.0, "read": (read - started) * 1e3, "assign": (done - read) * 1e3, "pack": 0.0}
        if packing is not None:
            packed = [packing.block(block, base) for block in kept]
            set_blocks(model, self.family, segment, packed, self.config)
            if segment.head:
                packing.head(model)
            timings["pack"] = (time.perf_counter() - done) * 1e3
        return Part(segment, model, self._windows_of(segment), timings)

    def _check_walk(self, model: Any, segment: Segment) -> None:
        if self._named and not segment.embed and self.family.task == "causal":
            check_walk(model, self.family, self.hidden, self.dtype, str(self.folder))

    def _windows_of(self, segment: Segment) -> list[int | None]:
        return [self.windows[i] for i in segment.blocks]

    def _check_tied(self) -> None:
        """A head's matrix that is stored although it is tied must be the embedding's."""
        head, table = self.family.head_key, self.key(self.family.embed_key)
        if head in self.index and table in self.index and not self.index.same_content(head, table):
            raise CheckpointError(
                f"tie_word_embeddings is set, but {head!r} and {table!r} are stored with different values",
                where=self._where,
                expected="one table for both",
                remedy='Set "tie_word_embeddings": false if the model was trained with two',
            )
