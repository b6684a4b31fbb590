"""Averages at a round's end and sums at a window's: the same numbers whatever the order in which members arrive.

FedAvg weighs each member by the samples it processed: McMahan et al., arXiv 1602.05629. The mean is built member by
member (``mean += (x − mean) · n / total``; West 1979), in float32 or, for float64 tensors, float64: one member or
several equal ones average to exactly themselves, and nothing can overflow on the way.

Factors of LoRA have two ways. ``factors`` averages A and B each for itself; cheap, but the mean of products B·A is not
the product of means (arXiv 2403.12313). ``dense`` takes the mean of the products and splits it again by a truncated SVD
into factors of the same rank (FlexLoRA, arXiv 2402.11505). The scaling alpha / r is the same everywhere, so it cancels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from splitlm.core.errors import ProtocolError, SplitlmError

Lora = Literal["factors", "dense"]
"""What ``fine-tune.LoRA.aggregate`` takes."""
_A = re.compile(r"(?:^|(?<=\.))(lora_(?:embedding_)?)A(?=\.|$)")
_T = TypeVar("_T")


def average(
    members: Sequence[tuple[int, Mapping[str, Tensor]]], *, lora: Lora = "factors", names: Sequence[str] = ()
) -> dict[str, Tensor] | None:
    """The mean of members' tensors, weighted by samples; None when no member has any: the role keeps its parameters.

    Args:
        members: (samples, tensors by name), in the order that all runs have in common.
        lora: how pairs of LoRA factors are averaged.
        names: what errors call the members.

    Raises:
        ProtocolError, SplitlmError: see ``Averager.add``.
    """
    averager = Averager(len(members), lora=lora, names=names)
    for i, (samples, state) in enumerate(members):
        averager.add(i, samples, state)
    return averager.result()


def reduce(gradients: Sequence[Mapping[str, Tensor]], *, names: Sequence[str] = ()) -> dict[str, Tensor] | None:
    """The plain sum of members' gradients, added in the order given; None when every member's mapping is empty.

    A member without work in the window gives an empty mapping and counts for nothing. Each gradient is already scaled
    by the group's total, so the sum is that of one worker that did everything.

    Raises:
        ProtocolError, SplitlmError: see ``Reducer.add``.
    """
    reducer = Reducer(len(gradients), names=names)
    for i, given in enumerate(gradients):
        reducer.add(i, given)
    return reducer.result()


class Averager:
    """The same mean, with members added as they come.

    Members are taken in the order of their numbers. One that is early waits (by reference: leave its tensors alone),
    and is let go as soon as it was added, so the usual cost is one mean beside the members that overtook others. With
    ``dense``, the factors of all members are held until the end; they are small.

    Args:
        members: how many there are.
        lora: how pairs of LoRA factors are averaged.
        names: what errors call the members.
    """

    def __init__(self, members: int, *, lora: Lora = "factors", names: Sequence[str] = ()) -> None:
        self._turns = _Turns[tuple[int, Mapping[str, Tensor]]](members, names)
        self._mean = _Sums()
        self._lora = lora
        self._factors: list[tuple[int, dict[str, Tensor]]] = []
        self._total = 0

    def add(self, member: int, samples: int, state: Mapping[str, Tensor]) -> None:
        """Take one member. One with 0 samples is left out, whatever its tensors; say so too of one that was lost.

        Raises:
            ProtocolError: keys, shapes or element types differ from those of the members before it, tensors that are
                not floats are not equal, or the count is negative; the message names member and key.
            SplitlmError: a number is not finite; the message names member and tensor.
            RuntimeError: the member was added before, or there is no such member.
        """
        for name, (count, tensors) in self._turns.take(member, (samples, state)):
            if count < 0:
                raise ProtocolError(f"{count} samples were counted", where=name, expected="0 or more")
            if count:
                self._take(name, count, tensors)

    def _take(self, name: str, samples: int, state: Mapping[str, Tensor]) -> None:
        self._mean.check(name, state)
        self._total += samples
        factors = {key for pair in _pairs(name, state) for key in pair} if self._lora == "dense" else set()
        if factors:
            self._factors.append((samples, {key: _wide(state[key]) for key in sorted(factors)}))
        for key in sorted(state.keys() - factors):
            self._mean.lean(key, state[key], samples / self._total)

    def result(self) -> dict[str, Tensor] | None:
        """The mean in new memory, with the members' element types; None when no member had samples.

        Raises:
            RuntimeError: a member has not been added.
        """
        self._turns.finish()
        if not self._total:
            return None
        first = self._factors[0][1] if self._factors else {}
        for a, b in _pairs("", first):
            members = [(samples / self._total, state[b], state[a]) for samples, state in self._factors]
            self._mean.put(b, a, _refactor(members))
        return self._mean.narrow()


class Reducer:
    """The plain sum of ``reduce``, with members added as they come and taken in the order of their numbers.

    Args:
        members: how many there are.
        names: what errors call the members.
    """

    def __init__(self, members: int, *, names: Sequence[str] = ()) -> None:
        self._turns = _Turns[Mapping[str, Tensor]](members, names)
        self._sum = _Sums()

    def add(self, member: int, gradients: Mapping[str, Tensor]) -> None:
        """Take one member's gradients by parameter name; empty where it had no work.

        Raises:
            ProtocolError, SplitlmError, RuntimeError: as ``Averager.add``.
        """
        for name, state in self._turns.take(member, gradients):
            if state:
                self._sum.check(name, state)
                for key in sorted(state):
                    self._sum.plus(key, state[key])

    def result(self) -> dict[str, Tensor] | None:
        """The sum in new memory, with the members' element types; None when nobody had work.

        Raises:
            RuntimeError: a member has not been added.
        """
        self._turns.finish()
        return self._sum.narrow() or None


class _Turns(Generic[_T]):
    """Gives back in the order of numbers what comes in any order."""

    def __init__(self, members: int, names: Sequence[str]) -> None:
        if names and len(names) != members:
            raise RuntimeError(f"{len(names)} names for {members} members")
        self._names = tuple(names) or tuple(f"member {i}" for i in range(members))
        self._early: dict[int, _T] = {}
        self._next = 0

    def take(self, member: int, item: _T) -> Iterator[tuple[str, _T]]:
        """Store one, and yield all whose turn has come, with their names."""
        if not self._next <= member < len(self._names) or member in self._early:
            raise RuntimeError(f"member {member} of {len(self._names)} was added before, or is none")
        self._early[member] = item
        return self._ready()

    def _ready(self) -> Iterator[tuple[str, _T]]:
        while self._next in self._early:
            self._next += 1
            yield self._names[self._next - 1], self._early.pop(self._next - 1)

    def finish(self) -> None:
        """Make sure that nobody is missing."""
        if self._next < len(self._names):
            raise RuntimeError(f"{self._names[self._next]} has not been added")


class _Sums:
    """Accumulators by key, and what every member must agree on."""

    def __init__(self) -> None:
        self._first = ""
        self._kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._sums: dict[str, Tensor] = {}

    def check(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Compare a member with the first one, and look for numbers that are not finite."""
        kinds = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in state.items()}
        if not self._first:
            self._first, self._kinds = name, kinds
        for key in sorted(kinds.keys() | self._kinds.keys()):
            ours, theirs = self._kinds.get(key), kinds.get(key)
            if ours != theirs:
                raise ProtocolError(
                    f"The tensor {key!r} is {_kind(theirs)}",
                    where=name,
                    expected=f"{_kind(ours)}, as {self._first} has it",
                )
            if not bool(torch.isfinite(state[key]).all()):
                raise SplitlmError(
                    f"The tensor {key!r} has a number that is not finite",
                    where=name,
                    expected="finite numbers",
                    remedy="Lower learning-rate, set clip-grad-norm, or train in a wider element type",
                )

    def lean(self, key: str, tensor: Tensor, share: float) -> None:
        """Move a mean towards a tensor: a share of 1 makes it that tensor."""
        mean = self._sums.get(key)
        if mean is None:
            self._sums[key] = _wide(tensor, copy=True)
        elif tensor.is_floating_point():
            mean.add_((_wide(tensor) - mean).mul_(share))
        elif not torch.equal(mean, tensor):
            raise ProtocolError(
                f"The tensor {key!r} of {tensor.dtype} differs between members",
                where=key,
                expected="equal values, since there is no mean of them",
            )

    def plus(self, key: str, tensor: Tensor) -> None:
        """Add a tensor."""
        total = self._sums.get(key)
        self._sums[key] = _wide(tensor, copy=True) if total is None else total.add_(_wide(tensor))

    def put(self, b: str, a: str, factors: tuple[Tensor, Tensor]) -> None:
        """Set a pair of factors."""
        self._sums[b], self._sums[a] = factors

    def narrow(self) -> dict[str, Tensor]:
        """The sums in the element types, and the key order, of the first member."""
        return {key: self._sums[key].to(dtype) for key, (_, dtype) in self._kinds.items() if key in self._sums}


def _wide(tensor: Tensor, copy: bool = False) -> Tensor:
    """A tensor as it is accumulated: float64 and integers as they are, other floats in float32."""
    narrow = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.detach().to(torch.float32 if narrow else tensor.dtype, copy=copy)


def _kind(kind: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "absent" if kind is None else f"{str(kind[1]).removeprefix('torch.')} {list(kind[0])}"


def _pairs(name: str, state: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Keys of the factors (A, B) of each adapted matrix, sorted."""
    pairs = [(key, _A.sub(r"\1B", key)) for key in sorted(state) if _A.search(key)]
    for a, b in pairs:
        if b not in state or state[a].dim() != 2 or state[b].dim() != 2 or state[a].shape[0] != state[b].shape[1]:
            shapes = f"{list(state[a].shape)} and {list(state[b].shape) if b in state else 'nothing'}"
            raise ProtocolError(
                f"{a!r} and {b!r} are {shapes}", where=name, expected="factors [rank, inputs] and [outputs, rank]"
            )
    return pairs


def _refactor(members: Sequence[tuple[float, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Factors (B, A) of the best rank-r approximation of Σ share · B·A.

    The sum itself (outputs × inputs) is never made: it is [B₁ … B_k] · [share₁A₁; …; share_kA_k], and QR of both leaves
    a small core for the SVD. A gets orthonormal rows times one number, which gives it the members' mean norm, and B the
    rest. (With the singular values shared between both, a direction of value 0 would have no gradient ever again.)
    """
    rank = members[0][2].shape[0]
    outer = torch.cat([b.double() for _, b, _ in members], dim=1)
    inner = torch.cat([share * a.double() for share, _, a in members], dim=0)
    q_outer, r_outer = torch.linalg.qr(outer)
    q_inner, r_inner = torch.linalg.qr(inner.T)
    u, s, vh = torch.linalg.svd(r_outer @ r_inner.T, full_matrices=False)
    u, s, vh = u[:, :rank], s[:rank], vh[:rank]
    norm = sum(share * float(a.double().norm()) ** 2 for share, _, a in members) ** 0.5
    scale = norm / len(s) ** 0.5 or 1.0
    b = (q_outer @ u) * s / scale
    a = vh @ q_inner.T * scale
    lack = rank - len(s)  # a matrix with fewer rows or columns than the rank asks for
    return torch.nn.functional.pad(b, (0, lack)), torch.nn.functional.pad(a, (0, 0, 0, lack))
