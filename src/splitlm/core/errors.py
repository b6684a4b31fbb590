"""Every error splitlm raises on purpose, as one tree; each class says whose fault it is.

::

    SplitlmError
    ├── UsageError            the command line or the configuration is wrong            exit 2
    │   ├── CutError          a cut that no model can have
    │   ├── DataMissingError  rows that are nowhere
    │   └── PromptError       a prompt that the model cannot take
    ├── NetworkError          a peer, or the way to it, failed                          exit 3
    │   ├── AddressBusyError  a port that someone else holds
    │   ├── PeerMissingError  a neighbour that never came
    │   ├── PeerLostError     a neighbour that went away
    │   ├── PeerRefusedError  the two sides do not agree (model, version, token)
    │   └── ProtocolError     bytes or messages that the protocol does not allow
    ├── ModelError            a model directory or file is missing, damaged or unknown  exit 4
    │   ├── ModelMissingError
    │   ├── CheckpointError
    │   └── UnknownFamilyError
    └── CheckFailedError      a check ran and its answer is no                          exit 1

A message is one paragraph: what happened, where, what was expected, and what to do about it. The command line prints it
and exits with ``exit_code``; a traceback appears only with ``--debug``.
"""

from __future__ import annotations


class SplitlmError(Exception):
    """Base of every error that splitlm raises on purpose.

    Args:
        what: what happened, without a full stop.
        where: the place (``file:key``, ``host:port``, a peer's name), if there is one.
        expected: what would have been right.
        remedy: what the reader can do.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", expected: str = "", remedy: str = "") -> None:
        self.what, self.where, self.expected, self.remedy = what, where, expected, remedy
        super().__init__(what)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}." if self.where else f"{self.what}."
        if self.expected:
            text += f" Expected {self.expected}."
        if self.remedy:
            text += f" {self.remedy}."
        return " ".join(text.split())


class CheckFailedError(SplitlmError):
    """A check ran to its end and its answer is no."""


class UsageError(SplitlmError):
    """The caller's arguments or settings are wrong."""

    exit_code = 2


class CutError(UsageError):
    """A cut that does not fit the model."""


class DataMissingError(UsageError):
    """There are no such rows: no file, no split of that name, no data set that could be reached."""


class PromptError(UsageError):
    """A prompt that the model cannot take: no token at all, or longer than the context."""


class NetworkError(SplitlmError):
    """A peer, or the way to it, failed."""

    exit_code = 3


class AddressBusyError(NetworkError):
    """A listening address is held by another process or cannot be bound."""


class PeerMissingError(NetworkError):
    """A neighbour did not come before the deadline."""


class PeerLostError(NetworkError):
    """A neighbour that was there went away."""


class PeerRefusedError(NetworkError):
    """The two sides of a handshake do not agree; the message holds both values."""


class ProtocolError(NetworkError):
    """Bytes or messages that the protocol does not allow."""


class ModelError(SplitlmError):
    """A model's files are at fault."""

    exit_code = 4


class ModelMissingError(ModelError):
    """There is no such model, or a file of it is missing."""


class CheckpointError(ModelError):
    """A checkpoint file is truncated, is of another format, or does not agree with its config."""


class UnknownFamilyError(ModelError):
    """The model's architecture is not in the family table."""


def from_exit_code(code: int, text: str) -> SplitlmError:
    """The error a peer process reported, rebuilt from its exit code and its paragraph."""
    kinds: dict[int, type[SplitlmError]] = {2: UsageError, 3: NetworkError, 4: ModelError}
    return kinds.get(code, SplitlmError)(text.rstrip(". "))
