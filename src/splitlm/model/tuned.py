"""One part of a model that is trained: names as in the whole model, seeded dropout, graphs that live until used.

A microbatch goes through ``forward`` (or ``score``, on the part with the loss) and comes back through ``backward``. In
between its graph is kept, and nothing is computed twice: dropout would not be the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from splitlm.core.cut import Segment
from splitlm.core.errors import ModelError, ProtocolError
from splitlm.model.generator import GENERATOR
from splitlm.model.lora import ADAPTER, Lora, adapt, begin, targets_for
from splitlm.model.part import Part
from splitlm.model.seeding import Seeding
from splitlm.model.tunable import TunableFiles

Key = tuple[int, int]
"""A microbatch of a window: its owner, and its index there."""


class Goal(Protocol):
    """What is minimised, see ``finetune.objective.Objective``."""

    def run(self, model: Any, inputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The model's output; ``model(inputs, mask)`` gives the head's."""
        ...

    def value(self, output: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The sum of the loss over its items, and their number."""
        ...


class TunedPart:
    """A segment with gradients.

    Args:
        part: modules with weights, as loaded.
        files: where they are from.
        seeding: dropout's seeds; None turns dropout off.
        lora: adapters instead of the weights themselves.
        frozen_embedding: whether the embedding stays as it is.
    """

    def __init__(
        self,
        part: Part,
        files: TunableFiles,
        *,
        seeding: Seeding | None = None,
        lora: Lora | None = None,
        frozen_embedding: bool = False,
    ) -> None:
        self.part, self._files = part, files
        self._module: Any = part.module
        self._base: Any = getattr(part.module, files.family.base)
        self._graphs: dict[Key, tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._module.requires_grad_(True)
        tie([self])
        if lora is not None:
            self._adapt(lora)
        elif frozen_embedding and part.segment.embed:
            self._embedding.requires_grad_(False)
        if seeding is not None:
            seeding.attach(self._module, files.family, part.segment)
        self.train(dropout=seeding is not None)
        self.names: dict[str, str] = {}
        self.name_parameters()

    @property
    def segment(self) -> Segment:
        """What it holds."""
        return self.part.segment

    @property
    def live(self) -> int:
        """Graphs that are kept."""
        return len(self._graphs)

    @property
    def _embedding(self) -> nn.Module:
        found: nn.Module = getattr(self._base, self._files.family.embed)
        return found

    def name_parameters(self) -> None:
        """Take up the names of the parameters that are here now."""
        self.names = {name: self._whole(name) for name, _ in self._module.named_parameters()}

    def train(self, *, dropout: bool) -> None:
        """Dropout on or off."""
        self._module.train(dropout)

    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by its name in the whole model, sorted."""
        found = {self.names[n]: p for n, p in self._module.named_parameters() if p.requires_grad}
        return dict(sorted(found.items()))

    def weights(self) -> dict[str, torch.Tensor]:
        """Everything held that a checkpoint of the whole model would store, by its key there; adapters left out."""
        state = self._module.state_dict()
        return {self._whole(n): t for n, t in state.items() if ".lora_" not in n}

    def forward(self, key: Key, inputs: torch.Tensor, mask: torch.Tensor, *, keep: bool = True) -> torch.Tensor:
        """Hidden states ``[B, T, hidden]`` of one microbatch, detached.

        Args:
            key: the microbatch; its graph is kept under it.
            inputs: token ids ``[B, T]`` on the part with the embedding, else hidden states ``[B, T, hidden]``.
            mask: ``[B, T]``, 1 where there is a token.
            keep: False for validation: no graph, and no dropout.

        Raises:
            ProtocolError: a graph of this microbatch is kept already, or inputs of a wrong shape or type.
        """
        leaf, given = self._given(key, inputs, mask, keep)
        with self._training() if keep else self._looking():
            out: torch.Tensor = self._base(**given)[0]
        if keep:
            self._graphs[key] = (leaf, out)
        return out.detach()

    def score(
        self, key: Key, inputs: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor, goal: Goal, scale: float
    ) -> tuple[float, int]:
        """Run the part with the head up to the loss, keep its graph, and return the loss's sum and its items.

        Args:
            scale: what the sum is multiplied by before ``backward``: the one place where the loss is scaled.

        Raises:
            ModelError: the loss is not finite. Otherwise as ``forward``.
        """
        leaf, given = self._given(key, inputs, mask, keep=True)
        with self._training():
            total, count = goal.value(goal.run(self._head(given), *self._seen(leaf, inputs, mask)), labels)
        value = float(total.detach())
        if not torch.isfinite(total):
            raise ModelError(
                f"The loss of microbatch {key[1]} of owner {key[0]} is {value}", expected="a finite number"
            )
        self._graphs[key] = (leaf, total * scale)
        return value, count

    def outputs(self, inputs: torch.Tensor, mask: torch.Tensor, goal: Goal) -> torch.Tensor:
        """The head's outputs, without a graph and without dropout: for validation."""
        leaf, given = self._given((-1, -1), inputs, mask, keep=False)
        with self._looking():
            return goal.run(self._head(given), *self._seen(leaf, inputs, mask))

    @contextlib.contextmanager
    def _training(self) -> Iterator[None]:
        """A graph, and dropout from a generator that nobody else seeds meanwhile."""
        with GENERATOR if self._module.training else contextlib.nullcontext(), torch.enable_grad():
            yield

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        """No graph and no dropout for a while: what is trained in between is as if nobody had looked."""
        dropout = bool(self._module.training)
        self._module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._module.train(dropout)

    def _head(self, given: dict[str, Any]) -> Any:
        """The part with the head as an objective calls it."""
        name = "input_ids" if self.segment.embed else "inputs_embeds"

        def run(inputs: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            now = given | {name: inputs} | ({} if mask is None else {"attention_mask": mask.to(torch.int64)})
            if mask is None:
                now.pop("attention_mask")
            logits: torch.Tensor = self._module(**now).logits
            return logits

        return run

    @staticmethod
    def _seen(leaf: torch.Tensor | None, inputs: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (inputs if leaf is None else leaf), mask

    def backward(self, key: Key, gradient: torch.Tensor | None = None) -> torch.Tensor | None:
        """Take a microbatch's gradient through its graph, which is freed; the gradient of its input, if it had one.

        Args:
            gradient: of what ``forward`` returned; None after ``score``.

        Raises:
            ProtocolError: no graph of this microbatch is kept, or a gradient of another shape or type.
        """
        if key not in self._graphs:
            raise ProtocolError(
                f"A gradient came for microbatch {key[1]} of owner {key[0]}",
                where=str(self.segment),
                expected="one whose graph is kept here, once",
            )
        leaf, out = self._graphs[key]
        if gradient is not None and (gradient.shape != out.shape or gradient.dtype != out.dtype):
            raise ProtocolError(
                f"A gradient of shape {list(gradient.shape)} and type {gradient.dtype} came",
                where=str(self.segment),
                expected=f"{list(out.shape)} {out.dtype}",
            )
        del self._graphs[key]
        if out.requires_grad:  # a front whose embedding is frozen and that has nothing else has no gradient
            torch.autograd.backward(out, gradient)
        return leaf.grad if leaf is not None else None

    def drop(self) -> None:
        """Forget all graphs and gradients: the window was aborted."""
        self._graphs.clear()
        self._module.zero_grad(set_to_none=True)

    def _given(self, key: Key, inputs: torch.Tensor, mask: torch.Tensor, keep: bool) -> tuple[Any, dict[str, Any]]:
        if keep and key in self._graphs:
            raise ProtocolError(
                f"Microbatch {key[1]} of owner {key[0]} came twice", where=str(self.segment), expected="it once"
            )
        self._check(inputs, mask)
        leaf = None
        if not self.segment.embed:
            leaf = inputs = inputs.detach().requires_grad_(keep)
        given: dict[str, Any] = {
            "input_ids" if self.segment.embed else "inputs_embeds": inputs,
            "attention_mask": mask.to(torch.int64),
        }
        if self._files.family.task == "causal":
            given["use_cache"] = False
        return leaf, given

    def _check(self, inputs: torch.Tensor, mask: torch.Tensor) -> None:
        files, embed = self._files, self.segment.embed
        shape = inputs.shape
        good = len(shape) == (2 if embed else 3) and 0 not in shape and mask.shape == shape[:2]
        good = good and inputs.dtype == (torch.int64 if embed else files.dtype)
        good = good and (embed or shape[2] == files.hidden)
        if not good:
            expected = "token ids [B, T] int64" if embed else f"[B, T, {files.hidden}] {files.dtype}"
            raise ProtocolError(
                f"Inputs of shape {list(shape)} and type {inputs.dtype} with a mask of {list(mask.shape)} came",
                where=str(self.segment),
                expected=f"{expected} and a mask [B, T]",
            )

    def _whole(self, local: str) -> str:
        """The name in the whole model of a parameter of this part."""
        family = self._files.family
        prefix = f"{family.base}.{family.layers}."
        if local.startswith(prefix):
            number, _, rest = local.removeprefix(prefix).partition(".")
            local = f"{family.block_prefix(self.segment.begin + int(number))}{rest}"
        return local.replace(".base_layer.", ".").replace(f".{ADAPTER}.", ".")

    def _adapt(self, lora: Lora) -> None:
        targets = targets_for(lora, str(self._files.config.model_type), self._files.family)
        layers = adapt(self._module, lora, targets)
        names = {id(module): self._whole(name) for name, module in self._module.named_modules()}
        for layer in layers:
            begin(layer, names[id(layer)], self._files.seed, self._files.dtype)
        if self._files.family.task == "classify" and self.segment.head:
            getattr(self._module, self._files.family.head).requires_grad_(True)  # it was made for these labels


def tie(parts: Sequence[TunedPart]) -> None:
    """Make one parameter of every table that several parts of one node share, so that its gradients are summed."""
    seen: dict[int, nn.Parameter] = {}
    for part in parts:
        for module in part.part.module.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                first = seen.setdefault(parameter.data_ptr(), parameter)
                if first is not parameter:
                    first.requires_grad_(first.requires_grad and parameter.requires_grad)
                    setattr(module, name, first)


def untie(part: TunedPart, files: TunableFiles) -> None:
    """Give the head of a whole model that is tied a table of its own, as whoever holds the head alone has."""
    head: Any = getattr(part.part.module, files.family.head)
    head.weight = nn.Parameter(head.weight.detach().clone())
    part.name_parameters()


def unique(parts: Sequence[TunedPart]) -> dict[str, nn.Parameter]:
    """What is trained in several parts of one node; a tied table once, under the embedding's name."""
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for part in parts:
        for name, parameter in part.parameters().items():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found[name] = parameter
    return dict(sorted(found.items()))


def load_into(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, torch.Tensor]) -> None:
    """Give parameters other values, by name.

    Raises:
        ModelError: other names, or another shape.
    """
    if set(parameters) != set(tensors):
        odd = sorted(set(parameters) ^ set(tensors))[0]
        raise ModelError(f"The tensor {odd!r} is on one side only", expected="the same parts of the same model")
    for name, parameter in parameters.items():
        tensor = tensors[name]
        if tensor.shape != parameter.shape:
            raise ModelError(
                f"{name} has shape {list(tensor.shape)}", expected=f"{list(parameter.shape)}, as the model here"
            )
        with torch.no_grad():
            parameter.copy_(tensor)
