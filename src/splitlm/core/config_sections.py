"""The sections of a run's configuration: every key, its type, its range, its default and what it means, once.

An attribute is its key with ``_`` for ``-``. The ranges and the choices written here are the ones that
:mod:`~splitlm.core.config_check` holds a value to and that the JSON Schema gives to an editor.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from splitlm.core.shape import SHAPES

SHAPE_NAMES = (*(shape.name for shape in SHAPES), "split")
"""What ``server.architecture`` takes; ``split`` is an older name of ``two-stage``."""
MODEL_NAMES = ("Bert", "GPT2", "Llama")
"""Names of models that older files use; anything else is a directory, a packaged name or a hub id."""

Count = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Positive = Annotated[float, Meta(gt=0)]
AtLeastZero = Annotated[float, Meta(ge=0)]


class Section(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """Base of all sections."""


class ModelLimit(Section, frozen=True):
    """``server.model.<name>``: what is asked of a model when ``server.model-name`` names it."""

    n_block: Annotated[Count | None, Meta(description="Use only the first n blocks; null uses all.")] = msgspec.field(
        default=None, name="n_block"
    )


class Parameters(Section, frozen=True):
    """``server.parameters``: where the weights come from and whether they are kept."""

    load: Annotated[bool, Meta(description="True: trained weights. False: a seeded initialisation.")] = True
    save: Annotated[bool, Meta(description="Write a checkpoint after every round.")] = True


class Dirichlet(Section, frozen=True):
    """``server.data-distribution.dirichlet``."""

    alpha: Annotated[Positive, Meta(description="Concentration: small is uneven, large is even.")] = 1.0


class DataDistribution(Section, frozen=True):
    """``server.data-distribution``: which rows each owner gets."""

    non_iid: Annotated[bool, Meta(description="Draw each owner's shares of the labels from a Dirichlet.")] = False
    num_sample: Annotated[Count | None, Meta(description="Rows per owner; null shares out all rows.")] = None
    num_label: Annotated[Count | None, Meta(description="Classes spread over owners; null takes all.")] = None
    dirichlet: Annotated[Dirichlet, Meta(description="Of the draw, where non-iid is True.")] = Dirichlet()
    refresh_each_round: Annotated[bool, Meta(description="Draw anew in every round, from seed + round.")] = False


class Server(Section, frozen=True):
    """``server``: the model, its cut, the data, and who takes part."""

    global_round: Annotated[Count, Meta(description="Rounds of training; updates are averaged after each.")] = 1
    clients: Annotated[tuple[Count, Count], Meta(description="How many owners, and how many workers.")] = (1, 1)
    architecture: Annotated[
        str,
        Meta(
            description="The shape of training: who holds which part of the model.",
            extra_json_schema={"enum": list(SHAPE_NAMES)},
        ),
    ] = "u-shape"
    cut_layers: Annotated[NotNegative, Meta(description="Blocks of the first part, at the owner.")] = 1
    tail_blocks: Annotated[NotNegative, Meta(description="Last blocks that stay at the owner, below the head.")] = 0
    model_name: Annotated[str, Meta(description="Bert, GPT2, Llama, a directory, or a hub id.")] = "Bert"
    model_path: Annotated[str | None, Meta(description="A local model in place of the one model-name means.")] = None
    data_name: Annotated[str, Meta(description="EMOTION, GSM8K, another data set of the hub, or a file.")] = "EMOTION"
    data_path: Annotated[str | None, Meta(description="A local file in place of the one data-name means.")] = None
    model: Annotated[dict[str, ModelLimit], Meta(description="Limits by model name; others lie unused.")] = {}
    parameters: Annotated[Parameters, Meta(description="Where weights come from, and whether they are kept.")] = (
        Parameters()
    )
    validation: Annotated[bool, Meta(description="Measure loss and metric after every round.")] = True
    evaluation_answers: Annotated[
        NotNegative, Meta(description="Questions that the coordinator's evaluation answers by generation, at most.")
    ] = 32
    data_distribution: Annotated[DataDistribution, Meta(description="Which rows each owner gets.")] = DataDistribution()
    random_seed: Annotated[int, Meta(ge=0, le=2**63 - 1, description="Of weights, dropout and the split of data.")] = 1
    aggregator: Annotated[
        str | None,
        Meta(description="Node that averages: worker-0, or a worker's host; null: the coordinator's process."),
    ] = None
    bus: Annotated[
        Literal["star", "rabbitmq"] | None,
        Meta(description="How control messages travel; null: star, or the broker where a rabbit section is."),
    ] = None

    @property
    def owners(self) -> int:
        """How many parties have data."""
        return self.clients[0]

    @property
    def workers(self) -> int:
        """How many parties compute for the owners."""
        return self.clients[1]


class Rabbit(Section, frozen=True):
    """``rabbit``: the broker, where one is used."""

    address: Annotated[str, Meta(description="Host of the broker.")] = "127.0.0.1"
    port: Annotated[Port | None, Meta(description="Its port; null: 5672, or 5671 with TLS.")] = None
    username: Annotated[str, Meta(description="Account on the broker.")] = "guest"
    password: Annotated[str, Meta(description="Its password; stored nowhere.")] = "guest"
    virtual_host: Annotated[str, Meta(description="Virtual host on the broker.")] = "/"
    tls: Annotated[bool, Meta(description="Reach the broker over TLS (amqps).")] = False

    @property
    def reached_at(self) -> tuple[str, int]:
        """Host and port, the port being the protocol's own where none is set."""
        return self.address, self.port if self.port is not None else 5671 if self.tls else 5672


class UShape(Section, frozen=True):
    """``learning.u-shape``: how tensors travel, and how many microbatches are under way at once."""

    transport: Annotated[
        Literal["tcp", "rabbitmq"], Meta(description="How tensors travel: direct links, or through the broker.")
    ] = "tcp"
    pinned_memory: Annotated[
        Literal["auto", "on", "off"], Meta(description="Page-locked buffers beside a GPU; auto tries once.")
    ] = "auto"
    pool_bytes: Annotated[Count, Meta(description="Bound of each pool of buffers, bytes.")] = 67108864
    transport_queue_size: Annotated[Count, Meta(description="Frames that may wait in one lane's queue.")] = 32
    adaptive_weights: Annotated[bool, Meta(description="Share work by the measured speed of workers.")] = True
    max_inflight: Annotated[Count, Meta(description="Live microbatches of an owner.")] = 2
    microbatches_per_window: Annotated[Count, Meta(description="Microbatches of an owner per optimizer step.")] = 8
    worker_max_inflight: Annotated[Count, Meta(description="Live graphs of a worker, over all owners.")] = 8
    timeout_seconds: Annotated[Positive, Meta(description="How long a silent peer is waited for, seconds.")] = 120.0


class Learning(Section, frozen=True):
    """``learning``: the optimizer, the batches and the objective."""

    learning_rate: Annotated[Positive, Meta(description="Step size of AdamW.")] = 1e-5
    weight_decay: Annotated[AtLeastZero, Meta(description="Decoupled weight decay of AdamW.")] = 0.01
    batch_size: Annotated[Count, Meta(description="Rows per microbatch.")] = 2
    control_count: Annotated[Count, Meta(description="two-stage: live graphs of a client, and batches per step.")] = 1
    clip_grad_norm: Annotated[AtLeastZero, Meta(description="Bound of each partition's norm; 0 is off.")] = 0.0
    loss_weighting: Annotated[
        Literal["microbatch", "token"], Meta(description="Mean of microbatch means, or a mean over tokens.")
    ] = "microbatch"
    body_sync: Annotated[
        Literal["round", "window"], Meta(description="Workers meet after a round, or before every step.")
    ] = "round"
    u_shape: Annotated[UShape, Meta(description="How tensors travel, and how many at once.")] = UShape()


class LoRA(Section, frozen=True):
    """``fine-tune.LoRA``."""

    r: Annotated[Count, Meta(description="Rank of the adapters.")] = 8
    alpha: Annotated[Positive, Meta(description="Scale of the adapters, as alpha / r.")] = 16.0
    aggregate: Annotated[
        Literal["factors", "dense"], Meta(description="Average the two factors, or their product.")
    ] = "factors"


class FineTune(Section, frozen=True):
    """``fine-tune``: what is trained."""

    name: Annotated[Literal["full", "LoRA"], Meta(description="Every weight, or adapters only.")] = "full"
    lora: Annotated[LoRA, Meta(description="The adapters, where name is LoRA.")] = msgspec.field(
        default=LoRA(), name="LoRA"
    )
    freeze_embeddings: Annotated[
        Literal["auto", "on", "off"],
        Meta(description="Keep the embedding as it is: its update names tokens. auto: with more than one owner."),
    ] = "auto"


class Optimizer(Section, frozen=True):
    """``optimizer``."""

    reset_each_round: Annotated[bool, Meta(description="Forget the optimizer's state after a round.")] = False


class Security(Section, frozen=True):
    """``security``: of the links between parties."""

    tls: Annotated[
        Literal["auto", "on", "off"], Meta(description="auto: on as soon as any endpoint is not loopback.")
    ] = "auto"
    certs: Annotated[str | None, Meta(description="Folder of the certificates.")] = None


class Privacy(Section, frozen=True):
    """``privacy``."""

    noise: Annotated[AtLeastZero, Meta(description="Noise on activations that leave an owner, in their std.")] = 0.0


class Settings(Section, frozen=True):
    """The whole file."""

    name: Annotated[str, Meta(description="Of the run: in logs and in the broker's queue names.")] = "splitlm"
    server: Annotated[Server, Meta(description="The model, its cut, the data, and who takes part.")] = Server()
    rabbit: Annotated[Rabbit, Meta(description="The broker, where one is used.")] = Rabbit()
    log_path: Annotated[str, Meta(description="Folder of the logs.")] = msgspec.field(default=".", name="log_path")
    debug_mode: Annotated[bool, Meta(description="Log at the level of debugging.")] = msgspec.field(
        default=False, name="debug_mode"
    )
    learning: Annotated[Learning, Meta(description="Optimizer, batches, objective.")] = Learning()
    fine_tune: Annotated[FineTune, Meta(description="What is trained.")] = FineTune()
    optimizer: Annotated[Optimizer, Meta(description="What happens to the optimizer's state.")] = Optimizer()
    security: Annotated[Security, Meta(description="Of the links between parties.")] = Security()
    privacy: Annotated[Privacy, Meta(description="What is added to what leaves an owner.")] = Privacy()
