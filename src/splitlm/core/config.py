"""The configuration of a run: read from a mapping, checked, stored. The command line opens the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import msgspec

from splitlm.core.config_check import active_blocks, check, credit
from splitlm.core.config_read import Reading, override
from splitlm.core.config_schema import schema
from splitlm.core.config_sections import (
    DataDistribution,
    FineTune,
    Learning,
    LoRA,
    ModelLimit,
    Optimizer,
    Parameters,
    Privacy,
    Rabbit,
    Security,
    Server,
    Settings,
    UShape,
)
from splitlm.core.config_tree import model_key, plain
from splitlm.core.errors import UsageError
from splitlm.core.shape import Shape, find_shape

__all__ = [
    "DataDistribution",
    "FineTune",
    "Learning",
    "LoRA",
    "ModelLimit",
    "Optimizer",
    "Parameters",
    "Privacy",
    "Rabbit",
    "RunConfig",
    "Security",
    "Server",
    "UShape",
    "here",
    "override",
    "read",
    "resolved",
    "schema",
]

Bus = Literal["star", "rabbitmq"]
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".txt", ".parquet")
"""What ``server.data-name`` ends with where it is a file and not the name of a data set."""


def names_model_path(name: str) -> bool:
    """Whether a ``server.model-name`` is a place on one machine, and not what a model is called everywhere."""
    return name.startswith((".", "~", "/"))


def names_data_path(name: str) -> bool:
    """Whether a ``server.data-name`` is a place on one machine, and not what a data set is called everywhere."""
    return name.startswith((".", "~", "/")) or name.endswith(DATA_SUFFIXES)


class RunConfig(Settings, frozen=True):
    """Everything that a run is told.

    Attributes:
        given: the paths that the file sets, in its order.
        where: the file, for messages.
    """

    given: tuple[str, ...] = ()
    where: str = "config"

    def check(self) -> None:
        """Raise for the first thing that cannot be right.

        Raises:
            UsageError: a value out of its range, a word that nothing knows, or keys that disagree.
            CutError: a cut that no model can have.
        """
        check(self, self.where)

    @property
    def shape(self) -> Shape:
        """The row of the table of shapes that ``server.architecture`` names."""
        return find_shape(self.server.architecture)

    @property
    def averages_at(self) -> str:
        """The node that averages; empty for the coordinator's process."""
        return "" if self.server.aggregator in (None, "coordinator") else str(self.server.aggregator)

    @property
    def n_block(self) -> int | None:
        """How many blocks of the model are used; None for all."""
        return active_blocks(self)

    @property
    def credit(self) -> int:
        """How many of an owner's microbatches may be live at one worker: 1 or more in a checked configuration."""
        return credit(self)

    def bus(self, local: bool) -> Bus:
        """How control messages travel.

        A ``rabbit`` section does not choose the broker where all roles are on this machine (``local``); elsewhere it
        does, unless ``server.bus`` says otherwise.
        """
        if self.server.bus is not None:
            return self.server.bus
        return "star" if local or not self.has_rabbit else "rabbitmq"

    @property
    def frozen_embedding(self) -> bool:
        """Whether embeddings stay as they are: the rows of their update that are not zero name an owner's tokens."""
        choice = self.fine_tune.freeze_embeddings
        return choice == "on" or (choice == "auto" and self.server.owners > 1)

    @property
    def has_rabbit(self) -> bool:
        """Whether there is a ``rabbit`` section, though it be empty."""
        return "rabbit" in self.given or self.rabbit != Rabbit()

    @property
    def unused(self) -> tuple[str, ...]:
        """The paths that the file sets and that a run of it reads in no case."""
        return self._unread(broker=self.server.bus != "star")

    def unused_here(self, local: bool) -> tuple[str, ...]:
        """The paths that the file sets and that this run does not read, given where its roles are."""
        return self._unread(broker=self.bus(local) == "rabbitmq")

    def _unread(self, broker: bool) -> tuple[str, ...]:
        shape, learning = self.shape, self.learning
        idle: list[tuple[bool, str]] = [
            (shape.loss != "owner", "server.tail-blocks."),
            (shape.agreed, "learning.control-count."),
            (not shape.agreed, "learning.loss-weighting."),
            (not shape.agreed, "learning.body-sync."),
            (not shape.agreed, "learning.u-shape.adaptive-weights."),
            (not shape.agreed, "learning.u-shape.max-inflight."),
            (not shape.agreed, "learning.u-shape.microbatches-per-window."),
            (not shape.agreed, "learning.u-shape.worker-max-inflight."),
            (not self.server.data_distribution.non_iid, "server.data-distribution.dirichlet.alpha."),
            (self.fine_tune.name != "LoRA", "fine-tune.LoRA."),
            (self.security.tls == "off", "security.certs."),
            (not broker and learning.u_shape.transport != "rabbitmq", "rabbit."),
        ]
        active = model_key(self.server.model_name)
        idle += [(model_key(name) != active, f"server.model.{name}.") for name in self.server.model]
        prefixes = tuple(path for true, path in idle if true)
        keys = [path for path in self.given if not any(other.startswith(f"{path}.") for other in self.given)]
        return tuple(path for path in keys if f"{path}.".startswith(prefixes))

    def rooted(self, at: Callable[[str], str]) -> RunConfig:
        """The same with every path as ``at`` gives it: relative paths are relative to the folder of the file.

        A name of a model counts as a path where it begins with ``.``, ``~`` or ``/``, and that of a data set also where
        it ends like a file (``DATA_SUFFIXES``).

        Args:
            at: a path from the file's own folder, such as ``lambda path: str(file.parent / Path(path).expanduser())``.

        Raises:
            UsageError: a path is in the home folder of a user who is not there.
        """

        def placed(key: str, path: str) -> str:
            try:
                return at(path)
            except RuntimeError:  # as expanduser says it
                raise UsageError(
                    f"{key} is {path[:200]!r}, and no such home folder is known",
                    where=f"{self.where}:{key}",
                    expected="a path, with ~ or ~user only where there is that user",
                ) from None

        def perhaps(key: str, path: str | None) -> str | None:
            return None if path is None else placed(key, path)

        server = self.server
        model, data = server.model_name, server.data_name
        changed = {
            "model_path": perhaps("server.model-path", server.model_path),
            "data_path": perhaps("server.data-path", server.data_path),
            "model_name": placed("server.model-name", model) if names_model_path(model) else model,
            "data_name": placed("server.data-name", data) if names_data_path(data) else data,
        }
        limits = {str(changed["model_name"]) if name == model else name: limit for name, limit in server.model.items()}
        return msgspec.structs.replace(
            self,
            server=msgspec.structs.replace(server, model=limits, **changed),
            security=msgspec.structs.replace(self.security, certs=perhaps("security.certs", self.security.certs)),
            log_path=placed("log_path", self.log_path),
        )


def read(mapping: Mapping[str, object] | None, where: str = "config") -> RunConfig:
    """A configuration from what a YAML file holds; call :meth:`RunConfig.check` before a run.

    A key may be written with dashes or underscores. A number such as ``1e-5`` and a choice such as ``off``, which YAML
    1.1 reads as text and as a truth value, are what they look like.

    Args:
        mapping: the file's content; None (an empty file) sets nothing.
        where: the file, for messages.

    Raises:
        UsageError: a key that no code knows, or a value of the wrong type.
    """
    reading = Reading(where)
    found = reading.section(mapping, Settings, "")
    return RunConfig(**cast(Any, found), given=tuple(reading.given), where=where)


def here(config: RunConfig, mine: RunConfig) -> RunConfig:
    """The run's settings with this machine's places: of model and data, of the broker, of its certificates.

    A name that is a path is a place too, whichever of the two has it; the run's ``n_block`` goes with the model.

    Args:
        config: what the coordinator says.
        mine: what this machine's own file says.
    """
    run, own = config.server, mine.server
    placed = any(map(names_model_path, (run.model_name, own.model_name)))
    model_name = own.model_name if placed else run.model_name
    placed = any(map(names_data_path, (run.data_name, own.data_name)))
    server = msgspec.structs.replace(
        run,
        model_name=model_name,
        model_path=own.model_path,
        model={model_name: ModelLimit(config.n_block)},
        data_name=own.data_name if placed else run.data_name,
        data_path=own.data_path,
    )
    security = msgspec.structs.replace(config.security, certs=mine.security.certs)
    return msgspec.structs.replace(config, server=server, rabbit=mine.rabbit, security=security)


def resolved(config: RunConfig) -> dict[str, object]:
    """The configuration with every default filled in, as a run's folder stores it: without the broker's password.

    Reading it again gives the same run. The ``rabbit`` section is left out where the file has none, since to have it
    chooses the broker.
    """
    stored = cast(dict[str, Any], plain(config))
    for name in ("given", "where", *([] if config.has_rabbit else ["rabbit"])):
        stored.pop(name)
    if config.has_rabbit:
        stored["rabbit"].pop("password")
    return stored
