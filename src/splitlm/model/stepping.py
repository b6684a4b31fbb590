"""What a party does with its gradients: sum them in the order of the microbatches, clip, step.

Gradients of floating point numbers depend on the order in which they are summed; arrival is not an order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import nn

from splitlm.core.errors import ModelError
from splitlm.model.tuned import Key

Gradients = dict[str, torch.Tensor]


class Stepping(msgspec.Struct, frozen=True, kw_only=True):
    """How parameters are updated.

    Attributes:
        learning_rate: of the optimizer.
        weight_decay: decoupled, as in AdamW.
        clip_grad_norm: largest L2 norm of a party's gradient; 0 turns clipping off.
        optimizer: ``adamw`` (Loshchilov and Hutter, 2019) or ``sgd``.
        eps: of AdamW.
    """

    learning_rate: float = 1e-5
    weight_decay: float = 0.01
    clip_grad_norm: float = 0.0
    optimizer: str = "adamw"
    eps: float = 1e-8

    def make(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
        """An optimizer of these, in the order of their names; None where there are none."""
        values = [parameters[name] for name in sorted(parameters)]
        if not values:
            return None
        if self.optimizer == "sgd":
            return torch.optim.SGD(values, lr=self.learning_rate, weight_decay=self.weight_decay)
        # Fused: one pass over a parameter and its state, where the others take ten.
        return torch.optim.AdamW(
            values, lr=self.learning_rate, weight_decay=self.weight_decay, eps=self.eps, fused=True
        )


class GradientSum:
    """The sum of a window's gradients over its microbatches, in their order.

    Args:
        parameters: of the party, by name.
        order: every microbatch of the window that will come to this party, in the order in which they are summed.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], order: Sequence[Key]) -> None:
        self._parameters = parameters
        self._order = list(order)
        self._next = 0
        self._early: dict[Key, Gradients] = {}
        self._whole: set[Key] = set()
        self.total: Gradients = {}

    def take(self, key: Key, *, whole: bool) -> None:
        """Take what ``backward`` left in the parameters for one microbatch.

        Args:
            whole: whether nothing more comes of it. Then it is added, once those before it were.
        """
        found = self._early.setdefault(key, {})
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                found[name] = found[name] + parameter.grad if name in found else parameter.grad
                parameter.grad = None
        if whole:
            self._whole.add(key)
            self._fold()

    def _fold(self) -> None:
        while self._next < len(self._order) and self._order[self._next] in self._whole:
            for name, gradient in self._early.pop(self._order[self._next]).items():
                if name in self.total:
                    self.total[name].add_(gradient)
                else:
                    self.total[name] = gradient
            self._next += 1

    @property
    def done(self) -> bool:
        """Whether every microbatch was added."""
        return self._next == len(self._order)

    def check_finite(self, who: str) -> None:
        """Whether the sum can be used.

        Raises:
            ModelError: naming the party and the parameter.
        """
        if bool(torch.isfinite(torch.nn.utils.get_total_norm(self.total.values()))):
            return  # one pass without a tensor in between; squares may be too large where the numbers are not
        for name, gradient in self.total.items():
            if not bool(torch.isfinite(gradient).all()):
                raise ModelError(f"The gradient of {name} is not finite", where=who, expected="finite numbers")


def step(
    optimizer: torch.optim.Optimizer | None,
    parameters: Mapping[str, nn.Parameter],
    total: Mapping[str, torch.Tensor],
    stepping: Stepping,
    scale: float = 1.0,
) -> float:
    """One optimizer step with these gradients; the L2 norm of the gradient before clipping.

    Args:
        scale: what the gradients are multiplied by first.
    """
    if optimizer is None or not total:
        return 0.0
    for name, parameter in parameters.items():
        gradient = total.get(name)
        if gradient is not None:
            gradient = gradient.to(parameter.device)  # a sum over workers comes from a link
        parameter.grad = None if gradient is None else gradient.mul_(scale) if scale != 1.0 else gradient
    given = [parameters[name] for name in sorted(total)]
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in given if parameter.grad is not None])
    if stepping.clip_grad_norm:
        torch.nn.utils.clip_grads_with_norm_(given, stepping.clip_grad_norm, norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)
