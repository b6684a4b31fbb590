"""Building segments of a model: only the parts asked for exist, and only their tensors are read.

``--loader shard`` (default) builds on the meta device and reads its own tensors. ``--loader hf`` lets transformers load
everything and then drops the rest: slower and larger, but independent, so that one loader's mistake cannot hide.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from splitlm.core.cut import Segment
from splitlm.core.errors import CheckpointError, UnknownFamilyError, UsageError
from splitlm.model.family import Family, check_layout, find_family
from splitlm.model.index import CheckpointIndex

Loader = Literal["shard", "hf"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class _NoPositions(nn.Module):
    """Stands where learned positions were already added by an earlier stage."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._zero = torch.zeros((), dtype=dtype)

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self._zero


@dataclass
class Part:
    """The modules of one segment, and how they came to be.

    Attributes:
        module: the causal model of transformers with what is not ours left out.
        windows: sliding window of each block of ours, or None.
        timings: milliseconds of ``construct``, ``read`` and ``assign``.
    """

    segment: Segment
    module: Any
    windows: list[int | None]
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Number of parameters held; a table that is both embedding and head counts once."""
        return sum(p.numel() for p in self.module.parameters())

    def tensors(self) -> list[torch.Tensor]:
        """Everything held, parameters and buffers."""
        return [*self.module.parameters(), *self.module.buffers()]


class ModelFiles:
    """One model directory, opened once per process: its config, family and index. Holds no weights.

    Args:
        folder: a model directory.
        family: name of a family, where its config does not say.
        dtype: ``auto`` (the checkpoint's own) or a torch element type by name.
    """

    def __init__(self, folder: Path, *, family: str = "", dtype: str = "auto") -> None:
        self.folder = folder
        self.index = CheckpointIndex(folder)
        where = str(folder / "config.json")
        self.family: Family = find_family(str(self.index.config.get("model_type")), family, where)
        try:
            self.config = AutoConfig.from_pretrained(folder, local_files_only=True)
        except (ValueError, KeyError, OSError, TypeError) as error:
            raise CheckpointError(f"transformers cannot read the config: {error}", where=where) from error
        self.blocks = int(self.config.num_hidden_layers)
        self.hidden = int(self.config.hidden_size)
        self.vocab = int(self.config.vocab_size)
        self.context = int(self.config.max_position_embeddings)
        self.tied = bool(self.config.tie_word_embeddings)
        self.dtype = self._dtype(dtype)
        self.built: list[int] = []
        plain = f"{self.family.base}."
        # Some published checkpoints keep the base model's keys without its prefix (GPT-2's does).
        self._strip = "" if any(key.startswith(plain) for key in self.index.entries) else plain

    @property
    def head_cost(self) -> float:
        """What the head reads per token, in blocks of this model (weights read are what decoding costs)."""
        prefix = self.key(self.family.block_prefix(0))
        entries = self.index.entries
        block = sum(e.end - e.begin for key, e in entries.items() if key.startswith(prefix))
        head = entries.get(self.key(self.family.head_key))
        return (head.end - head.begin) / block if head is not None and block else 0.0

    def _dtype(self, name: str) -> torch.dtype:
        stored = {entry.dtype for entry in self.index.entries.values() if entry.dtype.is_floating_point}
        if name == "auto":
            told = getattr(self.config, "dtype", None)
            if len(stored) == 1 and told is not None and told not in stored:
                raise CheckpointError(
                    f"The config says {told} and the tensors are {next(iter(stored))}",
                    where=str(self.folder),
                    expected="one element type",
                    remedy="Choose one with --dtype",
                )
            chosen: torch.dtype | None = told or (next(iter(stored)) if len(stored) == 1 else None)
            if chosen is None or chosen not in DTYPES.values():
                raise CheckpointError(
                    f"The checkpoint's element types are {sorted(map(str, stored))}",
                    where=str(self.folder),
                    expected="one of " + ", ".join(DTYPES),
                    remedy="Choose one with --dtype",
                )
            return chosen
        if name not in DTYPES:
            raise UsageError(f"{name!r} is no element type", where="--dtype", expected="auto, " + ", ".join(DTYPES))
        return DTYPES[name]

    def key(self, name: str) -> str:
        """The checkpoint's key of a parameter of the causal model."""
        if self.tied and name == self.family.head_key:
            name = self.family.embed_key
        return name.removeprefix(self._strip) if self._strip else name

    def load(self, segments: Sequence[Segment], loader: Loader = "shard") -> list[Part]:
        """The modules of these segments, in order; a table that two of them need is held once.

        Raises:
            CheckpointError: a tensor is missing, of another shape, or one was read that no segment holds.
            UnknownFamilyError: the model does not have its family's layout.
        """
        build = {"shard": self._load_shard, "hf": self._load_whole}[loader]
        shared: dict[str, torch.Tensor] = {}
        parts = [build(segment, shared) for segment in segments]
        for part in parts:
            self._check(part)
        return parts

    def _sliced(self, blocks: range) -> Any:
        """The config as the base model must see it: as many layers as we hold, with their kinds."""
        config = copy.deepcopy(self.config)
        config.num_hidden_layers = len(blocks)
        for name in self.family.per_block:
            values = getattr(self.config, name, None)
            if isinstance(values, list | tuple) and len(values) == self.blocks:
                setattr(config, name, [values[i] for i in blocks])
        return config

    def _skeleton(self) -> Any:
        """The causal model on meta, with no block in it."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self._sliced(range(0)), dtype=self.dtype)
        check_layout(model, self.family, str(self.folder))
        return model.eval()

    def block_factory(self, skeleton: Any) -> Callable[[int], nn.Module]:
        """A maker of fresh meta blocks; each knows its index in the whole model."""
        config = copy.deepcopy(self.config)
        config._attn_implementation = skeleton.config._attn_implementation
        base = getattr(skeleton, self.family.base)
        names = list(getattr(type(base), "_no_split_modules", None) or ())
        module = sys.modules[type(base).__module__]
        block: Any = next((getattr(module, name) for name in names if hasattr(module, name)), None)
        if block is None:
            raise UnknownFamilyError(f"{type(base).__name__} does not name its block class", where=str(self.folder))

        def make(index: int) -> nn.Module:
            self.built.append(index)
            default = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            try:
                with torch.device("meta"):
                    made: nn.Module = block(config, layer_idx=index)
            finally:
                torch.set_default_dtype(default)
            return made.eval()

        return make

    def _load_shard(self, segment: Segment, shared: dict[str, torch.Tensor]) -> Part:
        started = time.perf_counter()
        model = self._skeleton()
        make = self.block_factory(model)
        self._leave_out(model, segment)
        base = getattr(model, self.family.base)
        setattr(base, self.family.layers, nn.ModuleList([make(i) for i in segment.blocks]))
        self._set_config(model, segment)
        compute_buffers(model)
        built = time.perf_counter()
        state, read_s = {}, 0.0
        expected = self._names(model, segment)
        for name, target in expected.items():
            key = self.key(name)
            if key not in shared:
                before = time.perf_counter()
                tensor = self.index.read(key, self.dtype if target.is_floating_point() else None)
                read_s += time.perf_counter() - before
                if tensor.shape != target.shape:
                    raise CheckpointError(
                        f"The tensor {key!r} has shape {list(tensor.shape)}",
                        where=str(self.folder),
                        expected=f"{list(target.shape)}, as config.json says",
                    )
                if key == self.key(self.family.embed_key) and self.tied:
                    shared[key] = tensor
            else:
                tensor = shared[key]
            local = self._local_name(name, segment)
            state[local] = tensor
        model.load_state_dict(state, assign=True, strict=True)
        done = time.perf_counter()
        timings = {"construct": built - started, "read": read_s, "assign": done - built - read_s}
        return Part(segment, model, self._windows(segment), {k: v * 1e3 for k, v in timings.items()})

    def _load_whole(self, segment: Segment, shared: dict[str, torch.Tensor]) -> Part:
        started = time.perf_counter()
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=self.dtype, local_files_only=True).eval()
        check_layout(model, self.family, str(self.folder))
        read = time.perf_counter()
        base = getattr(model, self.family.base)
        self._leave_out(model, segment)
        kept = list(getattr(base, self.family.layers))[segment.begin : segment.end]
        setattr(base, self.family.layers, nn.ModuleList(kept))
        self._set_config(model, segment)
        moved: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                if id(param) not in moved:
                    moved[id(param)] = nn.Parameter(param.detach().clone(memory_format=torch.contiguous_format), False)
                setattr(module, name, moved[id(param)])
        if self.tied and (segment.embed or segment.head):
            holder = getattr(base, self.family.embed) if segment.embed else getattr(model, self.family.head)
            key = self.key(self.family.embed_key)
            holder.weight = nn.Parameter(shared.setdefault(key, holder.weight.detach()), False)
        done = time.perf_counter()
        timings = {"construct": 0.0, "read": (read - started) * 1e3, "assign": (done - read) * 1e3}
        return Part(segment, model, self._windows(segment), timings)

    def _leave_out(self, model: Any, segment: Segment) -> None:
        base = getattr(model, self.family.base)
        if not segment.embed:
            setattr(base, self.family.embed, nn.Identity())
            if self.family.positions:
                setattr(base, self.family.positions, _NoPositions(self.dtype))
        if not segment.head:
            setattr(base, self.family.norm, nn.Identity())
            setattr(model, self.family.head, nn.Identity())

    def _set_config(self, model: Any, segment: Segment) -> None:
        """Let the base model see the layers it has; the blocks keep the whole model's config."""
        base = getattr(model, self.family.base)
        attention = model.config._attn_implementation
        config = self._sliced(segment.blocks)
        config._attn_implementation = attention
        model.config = base.config = config
        if hasattr(base, "has_sliding_layers"):
            base.has_sliding_layers = "sliding_attention" in (config.layer_types or ())

    def _names(self, model: Any, segment: Segment) -> dict[str, torch.Tensor]:
        """Every tensor to be loaded, under the whole model's names."""
        prefix = f"{self.family.base}.{self.family.layers}."
        found: dict[str, torch.Tensor] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name.startswith(prefix):
                local, rest = name.removeprefix(prefix).split(".", 1)
                name = f"{prefix}{segment.begin + int(local)}.{rest}"
            found[name] = tensor
        for name in found:
            if self.key(name) not in self.index:
                raise CheckpointError(
                    f"There is no tensor {self.key(name)!r}",
                    where=str(self.folder),
                    expected=f"every tensor of {segment}, as config.json describes the model",
                )
        return found

    def _local_name(self, name: str, segment: Segment) -> str:
        prefix = f"{self.family.base}.{self.family.layers}."
        if not name.startswith(prefix):
            return name
        index, rest = name.removeprefix(prefix).split(".", 1)
        return f"{prefix}{int(index) - segment.begin}.{rest}"

    def _windows(self, segment: Segment) -> list[int | None]:
        """The sliding window of each block, as transformers' own cache would choose it."""
        from transformers import DynamicCache

        layers = DynamicCache(config=self.config).layers
        return [getattr(layers[i], "sliding_window", None) if layers else None for i in segment.blocks]

    def _check(self, part: Part) -> None:
        left = [n for n, t in [*part.module.named_parameters(), *part.module.named_buffers()] if t.is_meta]
        if left:
            raise CheckpointError(
                f"{len(left)} tensors were never filled, the first is {left[0]!r}",
                where=str(self.folder),
                expected="every parameter loaded and every buffer computed",
                remedy="Report it with the model's name; --loader hf may work meanwhile",
            )
        for param in part.module.parameters():
            param.requires_grad_(False)


@torch.no_grad()
def compute_buffers(model: Any) -> None:
    """Fill buffers that no checkpoint stores (rotary frequencies, embedding scales), as transformers initialises them.

    Raises:
        CheckpointError: a buffer that transformers does not know how to fill.
    """
    for name, module in model.named_modules():
        lost = [
            b for b, t in module.named_buffers(recurse=False) if t.is_meta and b in module._non_persistent_buffers_set
        ]
        if not lost:
            continue
        for b in lost:
            blank = torch.empty_like(getattr(module, b), device="cpu")
            setattr(module, b, blank.fill_(float("nan")) if blank.is_floating_point() else blank.zero_())
        model._init_weights(module)
        for b in lost:
            value = getattr(module, b)
            if value.is_floating_point() and bool(value.isnan().any()):
                raise CheckpointError(f"The buffer {name}.{b} could not be computed", expected="a known kind of buffer")
