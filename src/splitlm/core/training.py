"""The control messages of training. A party is an owner or a worker; both talk with the coordinator alone.

A window of an agreed shape is one barrier (core/barrier.py): its PREPARE opens the window, a party's READY says that
its gradients are complete and finite, and nobody steps before COMMIT.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from splitlm.core.message import Message
from splitlm.core.shape import Role


class TrainingMessage(Message, frozen=True):
    """Base of the messages of training."""


class Register(TrainingMessage, frozen=True):
    """Party to coordinator: I am here.

    Attributes:
        role: what it can be.
        name: how it calls itself (``host:pid``).
        weight: how much of the work a worker takes, against the others.
        classes: that an owner's rows have; 0 where they have none.
        kept: whose files (``owner-1``) of which rounds lie in its folder, stored with the same rows: what it can go on
            from.
    """

    role: Role
    name: str
    weight: float = 1.0
    classes: int = 0
    kept: dict[str, list[int]] = msgspec.field(default_factory=dict)


class SavedFile(msgspec.Struct, frozen=True):
    """A file of a party's state after a round: its name in the round's folder, its size and SHA-256."""

    name: str
    nbytes: int
    digest: str


class Start(TrainingMessage, frozen=True):
    """Coordinator to party: the run begins, and this is your part in it.

    Attributes:
        party: its number among those of its role.
        owners: how many owners there are.
        workers: how many workers there are.
        run: number of the run, to be claimed on every link.
        settings: of the run (``core.config.resolved``), which hold for all.
        classes: of a classifier's head; 0 where there is none, or where the owners are to say.
        aggregator: where states go (host and port); an empty host means: where you reached me.
        resume: the last complete round that is to be gone on from; −1 for a new run.
        stored: the party whose files of that round are to be taken: this one, or, where it had no part in the round,
            another of its role, whose weights are the same.
        files: of that party.
        averages: whether this worker averages for all, in the coordinator's place.
    """

    party: int
    owners: int
    workers: int
    run: str
    settings: dict[str, object]
    classes: int = 0
    aggregator: tuple[str, int] = ("", 0)
    resume: int = -1
    stored: str = ""
    files: list[SavedFile] = msgspec.field(default_factory=list)
    averages: bool = False


class Loaded(TrainingMessage, frozen=True, tag="trainloaded"):
    """Party to coordinator: my parts are built, and I listen (workers), or my rows are read (owners).

    An empty ``host`` means: the address from which you see me. ``token_loss``: an owner's loss is a mean over tokens,
    of which there is a perplexity. ``rows`` and ``batches`` are an owner's, of the first round. ``state`` is the port
    for states of the worker that averages.
    """

    host: str = ""
    activation: int = 0
    gradient: int = 0
    rows: int = 0
    parameters: int = 0
    token_loss: bool = False
    batches: int = 0
    state: int = 0


class Peer(msgspec.Struct, frozen=True):
    """A worker as owners reach it."""

    worker: int
    host: str
    activation: int
    gradient: int
    weight: float


class Peers(TrainingMessage, frozen=True):
    """Coordinator to all: these take part from now on; owners dial the workers they have no link to.

    ``aggregator`` is where states go (host and port) when a worker averages; otherwise it is where ``Start`` said.
    """

    owners: list[int]
    workers: list[Peer]
    aggregator: tuple[str, int] | None = None


class Linked(TrainingMessage, frozen=True):
    """Party to coordinator: I am linked to all of ``Peers``."""


class Round(TrainingMessage, frozen=True):
    """Coordinator to all: a round begins.

    Attributes:
        validate: whether owners hold their model against rows of validation before the round's average.
    """

    round: int
    validate: bool = False


class Window(TrainingMessage, frozen=True):
    """Coordinator to all (the barrier's PREPARE): a window begins; owners say what they have for it.

    Attributes:
        seq: number of the barrier; every attempt has a higher one.
        round: of the run.
        window: of the round; an attempt that is repeated has the same.
        workers: who takes part.
        speeds: of workers that measured theirs in the last window, in padded tokens per second.
        train: False for a window of validation: forward only, and nobody steps at its COMMIT.
    """

    seq: int
    round: int
    window: int
    workers: list[int]
    speeds: dict[int, float] = msgspec.field(default_factory=dict)
    train: bool = True


class Over(TrainingMessage, frozen=True):
    """Coordinator to all: no owner has anything left in this round, to train or to validate; owners notify."""

    round: int


class Plan(TrainingMessage, frozen=True):
    """Owner to coordinator: what I have for this window.

    Attributes:
        assign: the worker of each of its microbatches, in their order.
        items: of the losses of all of them, for a token-weighted mean.
        left: how many microbatches are left for later windows.
    """

    seq: int
    assign: list[int]
    items: int
    left: int


class Share(msgspec.Struct, frozen=True):
    """One owner's plan."""

    owner: int
    assign: list[int]
    items: int


class Opened(TrainingMessage, frozen=True):
    """Coordinator to all: every owner has planned; compute."""

    seq: int
    shares: list[Share]


class Stepped(TrainingMessage, frozen=True):
    """Party to coordinator, beside the barrier's DONE: what the window was like here.

    Sums and counts alone; the loss's are an owner's.
    """

    seq: int
    loss: float = 0.0
    items: int = 0
    tokens_per_s: float = 0.0
    norm: float = 0.0


class Working(TrainingMessage, frozen=True):
    """Party to coordinator: I am at work. Said from a timer: who is slow is not taken for dead.

    The coordinator hands a worker's on to owners, which wait for it.
    """

    round: int


class Notify(TrainingMessage, frozen=True):
    """Owner to coordinator: my rows of this round are done, backward and stepped.

    Attributes:
        samples: rows that were used.
        loss: sum over ``items``.
        valid_loss: sum over ``valid_items`` of the rows of validation, with the model before the average.
        correct: of the validation's metric, over ``counted``; nothing where there was none.
    """

    round: int
    samples: int
    loss: float
    items: int
    valid_loss: float = 0.0
    valid_items: int = 0
    correct: float = 0.0
    counted: int = 0


class Figures(TrainingMessage, frozen=True):
    """Party to coordinator, at each round's end: what its part has cost so far, by name (``node/figures``)."""

    values: dict[str, float]


class Gather(TrainingMessage, frozen=True):
    """Coordinator to all: send your state to the aggregator, and take the average from it."""

    round: int


class Average(TrainingMessage, frozen=True):
    """Coordinator to the worker that averages: from whom states come. Who was named before and is not now is lost.

    Attributes:
        seq: every one has a higher number.
        round: of the run; −1 before the first one ends.
        members: by role and number.
    """

    seq: int
    round: int
    members: list[tuple[Role, int]]


class Keep(TrainingMessage, frozen=True):
    """Coordinator to the worker that averages: everyone has the round's average; write the model, and evaluate it."""

    round: int


class Kept(TrainingMessage, frozen=True):
    """Worker that averages to coordinator: it is done.

    Attributes:
        round: of the run.
        counted: whose states are in the average.
        found: what the model of the round is worth, by the names of metrics; nothing without rows.
    """

    round: int
    counted: list[tuple[Role, int]]
    found: dict[str, float] = msgspec.field(default_factory=dict)


class Saved(TrainingMessage, frozen=True):
    """Party to coordinator: the round's average is in place, and my files of it are written, where I keep any."""

    round: int
    files: list[SavedFile] = msgspec.field(default_factory=list)


class Failed(TrainingMessage, frozen=True):
    """Party to coordinator: I cannot go on, and this is why.

    Attributes:
        code: exit code of the error's class.
        text: the error.
        where: ``window`` where only the window cannot be finished.
        seq: of that window's barrier.
        suspect: the party at whose door it lies, where that is another one.
    """

    code: int
    text: str
    where: Literal["", "window"] = ""
    seq: int = 0
    suspect: tuple[Role, int] | None = None


Any = (
    Register
    | Start
    | Loaded
    | Peers
    | Linked
    | Round
    | Window
    | Over
    | Plan
    | Opened
    | Stepped
    | Working
    | Notify
    | Figures
    | Gather
    | Average
    | Keep
    | Kept
    | Saved
    | Failed
)
