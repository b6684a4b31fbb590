"""What one party computes in training: its parts of the model, the walk of its microbatches through them, its steps.

No sockets and no event loop: frames' tensors in, tensors to be sent out. All of it runs on the compute thread.

A microbatch that reaches the part with the loss turns round there at once. Gradients are kept per microbatch until
their turn in the sum comes (``model/stepping``), and graphs until their gradient comes back (``model/tuned``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec
import torch

from splitlm.core.errors import ModelError, ProtocolError
from splitlm.core.shape import Role, Shape
from splitlm.finetune.batch import Microbatch
from splitlm.finetune.objective import Objective
from splitlm.finetune.scoring import Score, look, scored
from splitlm.finetune.seen import Seen
from splitlm.finetune.window import OpenWindow, Out, Tally, WindowScale
from splitlm.model import stepping
from splitlm.model.seeding import Seeding
from splitlm.model.stepping import GradientSum, Stepping
from splitlm.model.tuned import Key, TunedPart, tie, unique
from splitlm.wire.frame import Backward, Forward, Scored


class Party:
    """One owner or worker.

    Args:
        shape: the row of the table.
        role: which role this is.
        number: of the party among those of its role.
        parts: the parts it holds, by their place in the walk.
        goal: what is minimised; used where the loss is.
        how: of its optimizer.
        seeding: of dropout, or None.

    Attributes:
        every_batch: whether every microbatch brings a step.
    """

    def __init__(
        self,
        shape: Shape,
        role: Role,
        number: int,
        parts: Mapping[int, TunedPart],
        goal: Objective,
        how: Stepping,
        seeding: Seeding | None = None,
    ) -> None:
        self.shape, self.role, self.number, self.parts = shape, role, number, dict(parts)
        self._goal, self._how, self._seeding = goal, how, seeding
        self._last = len(shape.places) - 1
        tie(list(self.parts.values()))
        self.parameters = unique(list(self.parts.values()))
        self.optimizer = how.make(self.parameters)
        self.every_batch = not shape.agreed and shape.steps[role] == "batch"
        self._batches: dict[int, Microbatch] = {}
        self._round = self._number = 0
        self._window: OpenWindow | None = None
        self._seen = Seen()

    @property
    def live(self) -> int:
        """Graphs that are kept in the part where most are."""
        return max(part.live for part in self.parts.values())

    @property
    def window(self) -> OpenWindow:
        """The open one.

        Raises:
            ProtocolError: there is none.
        """
        if self._window is None:
            raise ProtocolError("No window is open", where=self.name, expected="a window before its frames")
        return self._window

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.role} {self.number}"

    @property
    def place(self) -> str:
        """Where trouble is: the party and its window."""
        return f"{self.name}, window {self._number} of round {self._round}"

    def open(
        self, round_: int, number: int, seq: int, order: Sequence[Key], scale: WindowScale, *, train: bool = True
    ) -> None:
        """A window begins.

        Args:
            round_: of the run.
            number: of the window in the round: dropout depends on it, and is the same in an attempt that is repeated.
            seq: of the attempt.
            order: all microbatches that will come here, in the order in which their gradients are summed.
            scale: of the loss.
            train: False for a window of validation: forward only, without dropout.
        """
        self.drop()
        self._round, self._number = round_, number
        self._window = OpenWindow(seq, scale, GradientSum(self.parameters, order if train else ()), train=train)

    def drop(self) -> None:
        """Forget the window: nothing has changed."""
        self._window = None
        self._batches.clear()
        self._seen.forget()
        for part in self.parts.values():
            part.drop()

    def begin(self, index: int, batch: Microbatch) -> Out:
        """An owner's first part of one microbatch; what goes on to the next."""
        self._batches[index] = batch
        window, key = self.window, (self.number, index)
        self._seed(key)
        out = self.parts[0].forward(key, batch.ids, batch.mask, keep=window.train)
        window.tally.samples += batch.samples
        window.tally.weight += batch.weight
        header = Forward(
            round=self._round,
            window=window.seq,
            owner=self.number,
            index=index,
            part=1,
            weight=batch.weight,
            train=window.train,
        )
        labels = (batch.labels,) if self.shape.labels_travel else ()
        return Out("activation", self.shape.places[1], -1, header, (out, batch.mask, *labels))

    def take_forward(self, header: Forward, tensors: Sequence[torch.Tensor]) -> list[Out] | None:
        """One microbatch comes to a part of this party; what is to be sent because of it. None: it came before.

        Raises:
            ProtocolError: a part that is not here, or tensors that do not belong to it.
            ModelError: the loss is not finite.
        """
        key = (header.owner, header.index)
        if not self._seen.is_new(header):
            return None
        part, started = self._part(header.part), time.perf_counter()
        if self.every_batch:
            self._round, self._number = header.round, header.window
        hidden, mask, labels = self._tensors(header, tensors)
        if not self.every_batch and header.train != self.window.train:
            raise ProtocolError("Frames of training and of validation came together", where=self.place, expected="one")
        if not header.train:
            return self._look(part, header, hidden, mask, labels)
        if self.every_batch:
            self._open_batch(header, key)
        if header.part == min(self.parts):
            self.window.tally.samples += hidden.shape[0]
            self.window.tally.weight += header.weight
        self._seed(key)
        if header.part != self._last:
            out = part.forward(key, hidden, mask)
            self.window.tally.seconds += time.perf_counter() - started
            return [self._onward(header, out, mask)]
        return self._turn(part, key, header, hidden, mask, self._labelled(labels))

    def _onward(self, header: Forward, out: torch.Tensor, mask: torch.Tensor) -> Out:
        """What a part that is not the last hands to the next."""
        onward = msgspec.structs.replace(header, part=header.part + 1, tensors=())
        role = self.shape.places[onward.part]
        return Out("activation", role, header.owner if role == "owner" else -1, onward, (out, mask))

    def _labelled(self, labels: torch.Tensor | None) -> torch.Tensor:
        if labels is None:
            raise ProtocolError("No labels came with a microbatch", where=self.name, expected="labels with its forward")
        return labels

    def _look(
        self, part: TunedPart, header: Forward, hidden: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor | None
    ) -> list[Out]:
        """Validation's forward: nothing is kept of it but, at the end of its walk, sums and counts at its owner."""
        if header.part != self._last:
            out = part.forward((header.owner, header.index), hidden, mask, keep=False)
            return [self._onward(header, out, mask)]
        place = f"{self.place}, microbatch {header.index} of owner {header.owner} in validation"
        found = look(part, self._goal, hidden, mask, self._labelled(labels), place)
        if self.role == "owner":
            self.window.tally.add(*found)
            return []
        return [scored(header, found)]

    def take_backward(self, header: Backward, gradient: torch.Tensor) -> list[Out] | None:
        """A gradient comes back to a part of this party; what is to be sent because of it. None: it came before.

        Raises:
            ProtocolError: no graph is kept for it here, or it has another shape.
        """
        key = (header.owner, header.index)
        if not self._seen.is_new(header):
            return None
        started = time.perf_counter()
        if not bool(torch.isfinite(gradient).all()):
            raise ModelError(
                f"The gradient of microbatch {header.index} of owner {header.owner} is not finite",
                where=self.place,
                expected="finite numbers",
            )
        back = self._part(header.part).backward(key, gradient)
        return self._returned(header.part, key, header, back, started)

    def _turn(
        self,
        part: TunedPart,
        key: Key,
        header: Forward,
        hidden: torch.Tensor,
        mask: torch.Tensor,
        labels: torch.Tensor,
    ) -> list[Out]:
        """The loss, and at once the first step back."""
        window, started = self.window, time.perf_counter()
        mine = self.role == "owner"
        scale = window.scale if mine or self.shape.agreed else WindowScale()
        try:
            value, items = part.score(key, hidden, mask, labels, self._goal, scale.of(header.weight))
        except ModelError as error:
            error.where = self.place
            raise
        window.tally.add(value, items)
        back = part.backward(key)
        sent = self._returned(self._last, key, header, back, started)
        if self.every_batch:
            window.sum.check_finite(self.place)
            if not mine:
                sent = [scored(header, Score(value, items)), *sent]
        return sent

    def _returned(
        self, at: int, key: Key, header: Forward | Backward, gradient: torch.Tensor | None, started: float
    ) -> list[Out]:
        """A part's backward is done: take its gradients, and send the input's on."""
        window = self.window
        first = min(self.parts)
        window.sum.take(key, whole=at == first)
        window.tally.seconds += time.perf_counter() - started
        if at == 0:
            return []
        if gradient is None:
            raise ModelError(f"Part {at} gave its input no gradient", where=self.name, expected="one")
        if self.role == "worker":
            window.tally.padded += gradient.shape[0] * gradient.shape[1]
        back = Backward(round=header.round, window=header.window, owner=header.owner, index=header.index, part=at - 1)
        role = self.shape.places[at - 1]
        return [Out("gradient", role, header.owner if role == "owner" else -1, back, (gradient,))]

    def add(self, told: Scored) -> bool:
        """Sums that the party with the loss reports of one of this owner's microbatches; False: they came before.

        Raises:
            ProtocolError: the microbatch is none of this owner's.
        """
        if told.owner != self.number or told.index not in self._batches:
            raise ProtocolError(
                f"The loss of microbatch {told.index} of owner {told.owner} came", where=self.name, expected="ours"
            )
        if not self._seen.is_new(told):
            return False
        self.window.tally.add(told.loss, told.items, told.correct, told.counted)
        return True

    def check(self) -> None:
        """Whether the window's gradients are complete and finite.

        Raises:
            ModelError: they are not finite; the parameter is named.
            ProtocolError: some are missing.
        """
        if not self.window.sum.done:
            raise ProtocolError("Gradients of some microbatches are missing", where=self.name, expected="all of them")
        self.window.sum.check_finite(self.place)

    def step(self, scale: float | None = None) -> float:
        """Step with the window's gradients; the norm before clipping.

        Args:
            scale: by what they are multiplied; None: so that they estimate the objective of the whole group.
        """
        window = self.window
        if scale is None:
            scale = window.scale.total / window.scale.own if window.scale.own else 1.0
        norm = stepping.step(self.optimizer, self.parameters, window.sum.total, self._how, scale)
        window.sum.total = {}
        return norm

    def reset(self) -> None:
        """Forget the optimizer's state."""
        self.optimizer = self._how.make(self.parameters)

    def counted(self) -> int:
        """Samples since this was last asked, where every microbatch is a window and has been stepped with."""
        self.settle()
        if self._window is None:
            return 0
        samples, self._window.tally.samples = self._window.tally.samples, 0
        return samples

    def settle(self) -> None:
        """Step, where every microbatch brings a step: what is sent because of it, and is waited for, leaves first."""
        if self.every_batch and self._window is not None and self._window.sum.total:
            self.step(1.0)

    def _open_batch(self, header: Forward, key: Key) -> None:
        """A party that steps after every microbatch has a window for each; what was counted goes on."""
        tally = self._window.tally if self._window else Tally()
        self._window = OpenWindow(header.window, WindowScale(), GradientSum(self.parameters, [key]), tally)

    def _part(self, at: int) -> TunedPart:
        if at not in self.parts:
            raise ProtocolError(f"A frame for part {at} came", where=self.name, expected=f"part {sorted(self.parts)}")
        return self.parts[at]

    def _tensors(
        self, header: Forward, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Hidden states, mask and labels: the owner's own where it has them."""
        wanted = 2 + self.shape.labels_travel
        if len(tensors) != wanted and not (header.part > 1 and len(tensors) == 2):
            raise ProtocolError(f"{len(tensors)} tensors came with a microbatch", where=self.name, expected=str(wanted))
        hidden, mask = tensors[0], tensors[1]
        if not bool(torch.isfinite(hidden).all()):
            raise ModelError(
                f"The hidden states of microbatch {header.index} of owner {header.owner} are not finite",
                where=self.place,
                expected="finite numbers",
            )
        if self.role == "owner":
            batch = self._batches.get(header.index)
            if batch is None or header.owner != self.number:
                raise ProtocolError(
                    f"Microbatch {header.index} of owner {header.owner} came back", where=self.name, expected="our own"
                )
            return hidden, batch.mask, batch.labels
        return hidden, mask, tensors[2] if len(tensors) > 2 else None

    def _seed(self, key: Key) -> None:
        if self._seeding is not None:
            self._seeding.at(self._round, self._number, *key)
