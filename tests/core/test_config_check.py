"""What cannot be right although every key has its type: where it is refused, and just beside it not."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from splitlm.core.config import ModelLimit, RunConfig, Server, override, read
from splitlm.core.errors import CutError

from .test_config import refused


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("server.clients=[0, 1]", ("[0, 1]", "at least 1")),
        ("server.clients=[1, 0]", ("[1, 0]", "at least 1")),
        ("server.global-round=0", ("at least 1",)),
        ("server.random-seed=-1", ("at least 0",)),
        ("server.data-distribution.num-sample=0", ("at least 1",)),
        ("server.data-distribution.num-label=0", ("at least 1",)),
        ("server.data-distribution.dirichlet.alpha=0", ("above 0",)),
        ("server.model.Bert.n_block=0", ("at least 1",)),
        ("server.model.Llama.n_block=-2", ("at least 1",)),
        ("rabbit.port=65536", ("at most 65535",)),
        ("rabbit.port=0", ("at least 1",)),
        ("learning.learning-rate=0", ("above 0",)),
        ("learning.learning-rate=-1.0", ("above 0",)),
        ("learning.weight-decay=-0.1", ("at least 0",)),
        ("learning.batch-size=0", ("at least 1",)),
        ("learning.control-count=0", ("at least 1",)),
        ("learning.clip-grad-norm=-1", ("at least 0",)),
        ("learning.u-shape.pool-bytes=0", ("at least 1",)),
        ("learning.u-shape.transport-queue-size=0", ("at least 1",)),
        ("learning.u-shape.max-inflight=0", ("at least 1",)),
        ("learning.u-shape.microbatches-per-window=0", ("at least 1",)),
        ("learning.u-shape.worker-max-inflight=0", ("at least 1",)),
        ("learning.u-shape.timeout-seconds=0", ("above 0",)),
        ("fine-tune.LoRA.r=0", ("at least 1",)),
        ("fine-tune.LoRA.alpha=0", ("above 0",)),
        ("privacy.noise=-1", ("at least 0",)),
        ("server.architecture=ushape", ("nearest is u-shape", "two-stage")),
        ("server.aggregator=owner-0", ("'owner-0'", "no owner may see", "worker-0", "coordinator")),
        ("server.aggregator=''", ("''", "worker-0")),
        ("server.bus=rabbit", ("nearest is rabbitmq", "star")),
        ("server.model-name=Bret", ("nearest is Bert", "./Bret")),
        ("server.model-name=GPT-2", ("nearest is GPT2",)),
        ("server.model-name=''", ("a hub id",)),
        ("learning.u-shape.transport=tpc", ("nearest is tcp",)),
        ("learning.u-shape.pinned-memory=atuo", ("nearest is auto",)),
        ("learning.loss-weighting=tokens", ("nearest is token",)),
        ("learning.body-sync=rounds", ("nearest is round",)),
        ("fine-tune.name=lora", ("nearest is LoRA",)),
        ("fine-tune.LoRA.aggregate=factor", ("nearest is factors",)),
        ("security.tls=never", ("auto", "off")),
        ("rabbit.address=''", ("a host alone",)),
    ],
)
def test_a_value_that_cannot_be_right_is_refused(setting: str, words: tuple[str, ...]) -> None:
    path = setting.partition("=")[0]
    refused(override({}, [setting], yaml.safe_load), f"c.yaml:{path}: ", path, *words)


def test_a_cut_that_no_model_can_have_is_refused() -> None:
    refused({"server": {"cut-layers": -1}}, "server.cut-layers", "at least 0", kind=CutError)
    refused({"server": {"tail-blocks": -1}}, "server.tail-blocks", "at least 0", kind=CutError)
    four = {"model": {"bert": {"n_block": 4}, "GPT2": {"n_block": 1}}}
    text = refused({"server": {**four, "cut-layers": 2, "tail-blocks": 2}}, "of 4", kind=CutError)
    assert text.startswith("c.yaml:server.cut-layers: ")
    read({"server": {**four, "cut-layers": 2, "tail-blocks": 1}}, "c.yaml").check()
    # The last part of two-stage takes all that is left: tail-blocks does not count.
    read({"server": {**four, "cut-layers": 3, "tail-blocks": 3, "architecture": "split"}}, "c.yaml").check()


def test_two_stage_has_one_last_stage() -> None:
    for name in ("two-stage", "split"):
        server = {"architecture": name, "clients": [3, 1]}
        config = read({"server": server}, "c.yaml")
        config.check()
        assert config.shape.name == "two-stage"
        refused({"server": server | {"clients": [3, 2]}}, "server.clients", "[n, 1]", "asks for 2", "u-shape")


def test_credits_fit_workers_and_queues() -> None:
    def file(clients: list[int], **u_shape: int) -> dict[str, Any]:
        return {"server": {"clients": clients}, "learning": {"u-shape": u_shape}}

    def credit(mapping: dict[str, Any]) -> int:
        config = read(mapping, "c.yaml")
        config.check()
        return config.credit

    refused(file([9, 1]), "learning.u-shape.worker-max-inflight: ", "at least the number of owners, 9")
    assert credit(file([8, 1])) == 1
    assert credit(file([3, 1], max_inflight=5)) == 2
    assert credit(file([1, 1], max_inflight=5)) == 5
    # A worker's queue holds the credit of all owners; an owner's what all workers may send back.
    assert credit(file([3, 1], max_inflight=2, transport_queue_size=6)) == 2
    refused(file([3, 1], max_inflight=2, transport_queue_size=5), "transport-queue-size: ", "at least 6")
    assert credit(file([2, 5], max_inflight=9, worker_max_inflight=2, transport_queue_size=5)) == 1
    refused(file([2, 5], max_inflight=9, worker_max_inflight=2, transport_queue_size=4), "at least 5")
    assert credit(file([2, 5], max_inflight=3, worker_max_inflight=2, transport_queue_size=3)) == 1
    two_stage = file([9, 1], transport_queue_size=1)
    two_stage["server"]["architecture"] = "two-stage"
    read(two_stage, "c.yaml").check()


@pytest.mark.parametrize(
    "name", ["bert-base-cased", "gpt2", "me/Bret", "./Bret", "~bret", ".bert", "bert\\x", "smollm2-135m", "llama"]
)
def test_a_path_and_a_hub_id_name_a_model(name: str) -> None:
    config = read({"server": {"model-name": name, "model": {name: {"n_block": 5}}}}, "c.yaml")
    config.check()
    assert config.n_block == 5 and config.unused == ()


def test_a_limit_is_found_in_any_case() -> None:
    server = Server(model_name="BERT", model={"bert": ModelLimit(n_block=2), "GPT2": ModelLimit(n_block=3)})
    assert RunConfig(server=server).n_block == 2


def test_the_ends_of_a_range_are_inside() -> None:
    for port in (1, 65535):
        read({"rabbit": {"port": port}, "learning": {"weight-decay": 0}}, "c.yaml").check()


def test_a_model_is_limited_once() -> None:
    refused({"server": {"model": {"Bert": {"n_block": 5}, "bert": {"n_block": 6}}}}, "server.model.Bert", "twice")
    refused({"server": {"model": {"Brt": {"n_block": 5}}}}, "server.model.Brt", "server.model.Bert")
