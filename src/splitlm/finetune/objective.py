"""What is minimised, per family of models: a table of objectives, which a caller extends by value.

To add a model: a row in ``model/family.py``, and an ``Objective`` given to ``register_objective``. docs/objectives.md
shows one, docs/adr/0006-objectives.md says why the table is a value.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional

from splitlm.core.errors import UsageError
from splitlm.finetune.batch import IGNORED
from splitlm.model.family import FAMILIES

Forward = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One entry of the table.

    Attributes:
        name: what it is called; ``register`` sets it.
        needs_mask: whether the model's forward takes the padding mask.
        token_loss: one label per token; otherwise one per sample.
        shift_labels: the output at a position is held against the label of the next one.
        label_key: the key of a data row that holds its class; for a token loss the labels are the row's own tokens,
            and the key is ``ids``.
        forward: ``forward(model, inputs, mask)``, instead of calling the model.
        loss: ``loss(output, labels)``: the *mean* over its items, a scalar, instead of cross entropy. Labels come
            shifted where ``shift_labels`` says so, and it passes over those that are -100.
    """

    name: str = ""
    needs_mask: bool
    token_loss: bool
    shift_labels: bool
    label_key: str
    forward: Forward | None = None
    loss: Loss | None = None

    def __post_init__(self) -> None:
        if self.shift_labels and not self.token_loss:
            raise UsageError(
                "labels of whole samples cannot be shifted",
                where=f"objective {self.name!r}",
                expected="shift_labels only beside token_loss",
            )

    def run(self, model: Any, inputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The model's output for a microbatch: with the entry's own ``forward``, or by calling ``model``.

        Args:
            model: any callable; it is given ``(inputs, mask)``, or ``(inputs)`` where no mask is needed.
            inputs: [B, T] ids, or [B, T, H] hidden states where only a model's end is held.
            mask: [B, T], 1 where there is a token.
        """
        if self.forward is not None:
            return self.forward(model, inputs, mask)
        output: torch.Tensor = model(inputs, mask) if self.needs_mask else model(inputs)
        return output

    def value(self, output: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The sum of the loss over its items, and their number; sum ÷ number is the loss as transformers computes it.

        The sum is differentiable, in float32 for half types, otherwise in the output's own dtype. Without any item it
        is a zero with a gradient of zeros, not the NaN that a mean would be.

        Args:
            output: [B, classes] logits, or [B, T, vocabulary] for a token loss; what an own ``loss`` takes, otherwise.
            labels: [B] or [B, T] int64, not shifted.

        Raises:
            UsageError: shapes that do not belong together, or a label that the output has no logit for.
        """
        targets = self._targets(output, labels)
        items = self._items(targets)
        if output.dtype in (torch.float16, torch.bfloat16):
            output = output.float()
        if items == 0:
            return output.sum() * 0, 0
        if self.loss is not None:
            mean = self.loss(output, targets)
            if mean.numel() != 1:
                raise UsageError(
                    f"the loss of objective {self.name!r} has shape {tuple(mean.shape)}",
                    where="register_objective",
                    expected="a scalar, the mean over the items",
                )
            return mean.reshape(()) * items, items
        self._check_classes(output, targets)
        total = functional.cross_entropy(
            output.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=IGNORED
        )
        return total, items

    def metric(self, output: torch.Tensor, labels: torch.Tensor) -> tuple[float, int]:
        """How many items the largest logit gets right, and how many there are; shapes and errors as in ``value``.

        (0.0, 0) where the output of an own ``loss`` is no logits: there is nothing to count.
        """
        targets = self._targets(output, labels)
        if self.loss is not None and not (output.shape[:-1] == targets.shape and output.shape[-1] > 1):
            return 0.0, 0
        right = output.detach().argmax(dim=-1) == targets  # never where a label is ignored: no index is negative
        return float(right.sum()), self._items(targets)

    def count(self, labels: torch.Tensor) -> int:
        """Items of the loss under these [B] or [B, T] labels: what ``value`` returns as their number."""
        return self._items(self._shifted(labels))

    def _targets(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The labels where the output is, shifted, once they fit it; an own ``loss`` judges its output itself."""
        dims = 2 if self.token_loss else 1
        fits = labels.dim() == dims and labels.dtype == torch.int64
        if self.loss is None:
            fits = fits and output.dim() == dims + 1 and output.shape[:-1] == labels.shape
        if not fits:
            raise UsageError(
                f"labels are {labels.dtype} of shape {tuple(labels.shape)}, the output has shape {tuple(output.shape)}",
                where=f"objective {self.name!r}",
                expected="int64 labels [batch, tokens] and logits [batch, tokens, vocabulary]"
                if self.token_loss
                else "int64 labels [batch] and logits [batch, classes]",
            )
        return self._shifted(labels.to(output.device))

    def _shifted(self, labels: torch.Tensor) -> torch.Tensor:
        # The labels move, not the logits: those would be copied, and they are the largest tensor of a step.
        return functional.pad(labels, (0, 1), value=IGNORED)[:, 1:] if self.shift_labels else labels

    @staticmethod
    def _items(targets: torch.Tensor) -> int:
        return int((targets != IGNORED).sum())

    def _check_classes(self, output: torch.Tensor, targets: torch.Tensor) -> None:
        # Before torch sees them: on CUDA a label out of range kills the process's context.
        wrong = targets[(targets != IGNORED) & ((targets < 0) | (targets >= output.shape[-1]))]
        if wrong.numel():
            raise UsageError(
                f"label {int(wrong[0])} for {output.shape[-1]} classes",
                where=f"objective {self.name!r}",
                expected=f"labels from 0 to {output.shape[-1] - 1}",
                remedy="Give the model as many classes (or tokens) as the data has",
            )


@dataclass(frozen=True)
class Objectives:
    """The table. It never changes: ``register`` returns a larger one, for ``train(objectives=...)``.

    Attributes:
        entries: objectives by name.
        families: names of objectives by family; what a family trains with if nothing else is asked for.
    """

    entries: Mapping[str, Objective]
    families: Mapping[str, str]

    def register(self, name: str, objective: Objective, *, families: Iterable[str] = ()) -> Objectives:
        """This table and one more entry, under a name that is not taken.

        Args:
            name: what asks for it.
            objective: the entry.
            families: families that train with it from now on.

        Raises:
            UsageError: the name is empty, or taken by an entry or a family.
        """
        if not name or name in self.entries or name in self.families:
            raise UsageError(
                f"the name {name!r} is {'taken' if name else 'empty'}",
                where="register_objective",
                expected=f"another name than {', '.join([*self.entries, *self.families])}",
            )
        defaults = {**self.families, **dict.fromkeys(families, name)}
        clash = [family for family in defaults if family in self.entries]
        if clash:
            raise UsageError(
                f"a family cannot be called {clash[0]!r}, which is an objective's name",
                where="register_objective",
                expected="the name of a family of models",
            )
        entries = {**self.entries, name: replace(objective, name=name)}
        return Objectives(MappingProxyType(entries), MappingProxyType(defaults))

    def find(self, key: str) -> Objective:
        """The entry of that name, or the one that a family of that name trains with.

        Raises:
            UsageError: there is neither.
        """
        name = self.families.get(key, key)
        if name in self.entries:
            return self.entries[name]
        near = difflib.get_close_matches(key, [*self.entries, *self.families], n=1)
        raise UsageError(
            f"there is no objective for {key!r}",
            where="objective",
            expected=f"one of {', '.join(self.entries)}, or a family: {', '.join(self.families)}",
            remedy=f"Did you mean {near[0]}" if near else "Add an entry with register_objective",
        )


def default_objectives() -> Objectives:
    """The entries that splitlm comes with.

    ``classification``: cross entropy over the classes of a sample. ``causal``: each token of a text is predicted from
    those before it. ``causal-unshifted``: each token is predicted from a prefix that contains it, as a known public
    version trains Llama; it learns to copy, is nobody's default, and is here for comparisons with that version only.
    """
    causal = Objective(needs_mask=True, token_loss=True, shift_labels=True, label_key="ids")
    return (
        Objectives(MappingProxyType({}), MappingProxyType({}))
        .register(
            "classification",
            Objective(needs_mask=True, token_loss=False, shift_labels=False, label_key="label"),
            families=("classify", *_families("classify")),
        )
        .register("causal", causal, families=_families("causal"))
        .register("causal-unshifted", replace(causal, shift_labels=False))
    )


def _families(task: str) -> tuple[str, ...]:
    return tuple(family.name for family in FAMILIES if family.task == task)


def register_objective(
    name: str, objective: Objective, *, families: Iterable[str] = (), objectives: Objectives | None = None
) -> Objectives:
    """A table with one more objective, to be given to ``train(objectives=...)``; nothing is stored anywhere.

    Args:
        name: what asks for it.
        objective: the entry.
        families: families of models that train with it from now on.
        objectives: the table to extend; the one that splitlm comes with, if none is given.

    Raises:
        UsageError: the name is empty or taken.
    """
    return (objectives or default_objectives()).register(name, objective, families=families)


def objective_for(key: str, objectives: Objectives | None = None) -> Objective:
    """What a family trains with, or the objective of that name.

    Args:
        key: a family (``bert``, ``llama``), a task (``classify``, ``causal``) or an objective's name.
        objectives: the table to look in; the one that splitlm comes with, if none is given.

    Raises:
        UsageError: there is none; the message lists all.
    """
    return (objectives or default_objectives()).find(key)
