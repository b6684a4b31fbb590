"""What one side of a training run has said, so that what a bus delivers twice is taken once."""

from __future__ import annotations

from splitlm.core import messages, training
from splitlm.core.message import Message


class Heard:
    """The newest message of each kind: their numbers, of an attempt or of a round, only grow.

    Of the barrier's messages these are its answers, which may come again when it is long over; what a leader repeats,
    the follower's table (core/barrier.py) knows.
    """

    def __init__(self) -> None:
        self._newest: dict[type[Message], int] = {}

    def repeats(self, said: Message) -> bool:
        """Whether this, or a later one of its kind, was heard before; from now on it was."""
        match said:
            case training.Window() | training.Plan() | training.Opened() | training.Stepped() | training.Average():
                number = said.seq
            case messages.Prepared() | messages.Nack() | messages.Done():
                number = said.seq
            case training.Round() | training.Over() | training.Notify() | training.Gather() | training.Saved():
                number = said.round
            case training.Keep() | training.Kept():
                number = said.round
            case training.Start() | training.Loaded() | training.Peers() | training.Linked():
                number = 0  # said once in a run
            case _:
                return False
        if number <= self._newest.get(type(said), -1):
            return True
        self._newest[type(said)] = number
        return False
