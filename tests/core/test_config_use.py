"""What a configuration says once it is read: what lies unused, who carries messages, what is stored, what is set."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from splitlm.core.config import Rabbit, override, read, resolved, schema
from splitlm.core.config_check import leaves
from splitlm.core.config_tree import every_path
from splitlm.core.errors import UsageError

from .test_config import DEFAULTS, OLDER


def test_what_a_shape_or_an_option_does_not_read_is_listed() -> None:
    u_shape = {
        "transport": "tcp",
        "adaptive-weights": True,
        "max-inflight": 2,
        "microbatches_per_window": 4,
        "worker-max-inflight": 4,
        "timeout-seconds": 9,
    }
    mapping = {
        "server": {"architecture": "two-stage", "tail-blocks": 1, "data-distribution": {"dirichlet": {"alpha": 2}}},
        "learning": {"control-count": 2, "loss-weighting": "token", "body-sync": "window", "u-shape": u_shape},
        "fine-tune": {"LoRA": {"r": 2}},
        "security": {"tls": "off", "certs": "certs"},
        "rabbit": {"address": "h"},
    }
    in_order = (
        "server.tail-blocks",
        "server.data-distribution.dirichlet.alpha",
        "learning.loss-weighting",
        "learning.body-sync",
        "learning.u-shape.adaptive-weights",
        "learning.u-shape.max-inflight",
        "learning.u-shape.microbatches-per-window",
        "learning.u-shape.worker-max-inflight",
        "fine-tune.LoRA.r",
        "security.certs",
    )
    config = read(mapping, "c.yaml")
    assert config.unused == in_order
    assert config.unused_here(local=True) == (*in_order, "rabbit.address")
    assert config.unused_here(local=False) == in_order
    mapping["server"]["bus"] = "star"  # type: ignore[index]
    assert read(mapping, "c.yaml").unused == (*in_order, "rabbit.address")
    u_shape["transport"] = "rabbitmq"  # tensors go through the broker, whatever the bus
    assert read(mapping, "c.yaml").unused == in_order
    used = {
        "server": {"tail-blocks": 1, "data-distribution": {"non-iid": True, "dirichlet": {"alpha": 2}}},
        "learning": {"loss-weighting": "token", "body-sync": "window", "u-shape": u_shape},
        "fine-tune": {"name": "LoRA", "LoRA": {"r": 2}},
        "security": {"certs": "certs"},
    }
    assert read(used, "c.yaml").unused == ()


@pytest.mark.parametrize(
    ("mapping", "here", "apart"),
    [
        ({}, "star", "star"),
        ({"rabbit": None}, "star", "rabbitmq"),
        ({"rabbit": {"address": "127.0.0.1"}}, "star", "rabbitmq"),
        ({"rabbit": None, "server": {"bus": "star"}}, "star", "star"),
        ({"server": {"bus": "rabbitmq"}}, "rabbitmq", "rabbitmq"),
    ],
)
def test_who_chooses_the_broker(mapping: Any, here: str, apart: str) -> None:
    config = read(mapping, "c.yaml")
    assert (config.bus(local=True), config.bus(local=False)) == (here, apart)
    again = read(resolved(config), "run.yaml")
    assert (again.bus(local=True), again.bus(local=False)) == (here, apart)


def test_a_broker_has_the_port_of_its_protocol() -> None:
    assert Rabbit().reached_at == ("127.0.0.1", 5672)
    assert Rabbit(tls=True).reached_at == ("127.0.0.1", 5671)
    assert Rabbit(tls=True, port=99).reached_at == ("127.0.0.1", 99)


def test_a_stored_configuration_gives_the_same_run() -> None:
    config = read(yaml.safe_load(OLDER), "c.yaml")
    again = read(yaml.safe_load(yaml.safe_dump(resolved(config))), "c.yaml")
    kept = {path: value for path, value, _ in leaves(config)}
    assert {path: value for path, value, _ in leaves(again)} == {**kept, "rabbit.password": "guest"}
    assert again.n_block == 8
    plain = resolved(read({}, "c.yaml"))
    assert set(plain) == {path.partition(".")[0] for path in DEFAULTS} - {"rabbit"}


def under(folder: str) -> Callable[[str], str]:
    return lambda path: str(PurePosixPath(folder) / path) if path[0] != "~" else path.replace("~", "HOME")


def test_relative_paths_are_the_files_own() -> None:
    server = {"model-path": "m", "data-path": "/abs/d.jsonl", "model-name": "me/it", "data-name": "rows.csv"}
    config = read({"server": server, "security": {"certs": "~/c"}, "log_path": "."}, "c.yaml").rooted(under("/etc/run"))
    assert (config.server.model_path, config.server.data_path) == ("/etc/run/m", "/abs/d.jsonl")
    assert (config.server.model_name, config.server.data_name) == ("me/it", "/etc/run/rows.csv")
    assert (config.security.certs, config.log_path) == ("HOME/c", "/etc/run")
    home = read({"server": {"model-name": "~/m", "data-name": "~/d"}}, "c.yaml").rooted(under("/etc"))
    assert (home.server.model_name, home.server.data_name) == ("HOME/m", "HOME/d")
    here = read({"server": {"model-name": "./it", "model": {"./it": {"n_block": 3}}}}, "c.yaml").rooted(under("/etc"))
    assert here.server.model_name == "/etc/it" and here.n_block == 3
    assert here.server.data_name == "EMOTION" and here.server.model_path is None and here.security.certs is None


def test_set_changes_a_copy() -> None:
    file = yaml.safe_load(OLDER)
    file["learning"]["u_shape"] = {"max_inflight": 3}
    before = copy.deepcopy(file)
    settings = [
        "learning.u-shape.max-inflight=4",
        "server.model.bert.n_block=6",
        "server.model.me/Llama-3.2-1B.n_block=2",
        "optimizer.reset_each_round=True",
        "log-path=a=b",
        "server.clients=[2, 1]",
        "name=first",
        "name=second",
        "server.data-path=",
    ]
    config = read(override(file, settings, yaml.safe_load), "c.yaml")
    config.check()
    assert file == before
    assert config.learning.u_shape.max_inflight == 4 and config.learning.batch_size == 4
    assert config.n_block == 6 and config.server.model["me/Llama-3.2-1B"].n_block == 2
    assert config.optimizer.reset_each_round and config.log_path == "a=b" and config.name == "second"
    assert config.server.clients == (2, 1) and config.server.data_path is None
    assert override(None, [], yaml.safe_load) == {}


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("server.clint=1", "server.clients"),
        ("server", "KEY=VALUE"),
        ("=1", "KEY=VALUE"),
        ("server.model.Bert=1", "server.model.NAME.KEY"),
        ("server.model.Bret.n_block=1", "server.model.Bert"),
        ("server.model.Bert.blocks=1", "server.model.Bert.n_block"),
        ("name.x=1", "has no keys"),
        ("server.clients=two", "two whole numbers"),
        ("server=1", "mapping"),
    ],
)
def test_a_wrong_set_is_named(setting: str, word: str) -> None:
    with pytest.raises(UsageError) as caught:
        override({}, [setting], yaml.safe_load)
    assert str(caught.value).startswith("--set") and word in str(caught.value)


def test_set_does_not_reach_into_what_is_no_section() -> None:
    with pytest.raises(UsageError, match="not a section"):
        override({"server": 3}, ["server.bus=star"], yaml.safe_load)


@pytest.mark.parametrize("name", ["demo-ushape.yaml", "demo-two-stage.yaml"])
def test_the_shipped_files_are_right(name: str) -> None:
    file = Path(__file__).parents[2] / "configs" / name
    config = read(yaml.safe_load(file.read_text(encoding="utf-8")), name).rooted(under(str(file.parent)))
    config.check()
    assert config.unused == ()
    assert config.shape.name == ("u-shape" if "ushape" in name else "two-stage")
    assert config.server.data_path is not None
    train = Path(config.server.data_path) / "train.jsonl"
    uncommented = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip() and "#" not in line]
    assert uncommented == []
    rows = [json.loads(line) for line in train.read_text(encoding="utf-8").splitlines()]
    assert len({row["text"] for row in rows}) == len(rows) >= config.server.owners * 96
    counts = [sum(row["label"] == label for row in rows) for label in range(6)]
    assert counts == [len(rows) // 6] * 6 and all(set(row) == {"text", "label"} for row in rows)


def properties(made: dict[str, Any], part: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Path -> the default that a schema tells an editor; ``...`` for a section. Every section must be closed."""
    section = made["$defs"][part["$ref"].rpartition("/")[2]]
    assert section["additionalProperties"] is False and "required" not in section
    found: dict[str, Any] = {}
    for key, inner in section["properties"].items():
        path = f"{above}{key}"
        free = inner.get("additionalProperties")
        found[path] = ... if "$ref" in inner or free else inner["default"]
        if "$ref" in inner or free:
            found |= properties(made, free or inner, f"{path}.<name>." if free else f"{path}.")
        assert above.endswith("<name>.") or inner.get("description"), path
    return found


def test_the_schema_has_every_key_with_its_default() -> None:
    made = json.loads(json.dumps(schema()))
    found = properties(made, made)
    assert tuple(found) == every_path()
    for path, default in DEFAULTS.items():
        assert found[path] == (list(default) if isinstance(default, tuple) else default), path
    learning = made["$defs"]["Learning"]["properties"]
    assert learning["learning-rate"]["exclusiveMinimum"] == 0 and learning["batch-size"]["minimum"] == 1
    assert set(learning["body-sync"]["enum"]) == {"round", "window"}
    assert set(made["$defs"]["Server"]["properties"]["architecture"]["enum"]) == {"u-shape", "two-stage", "split"}


def test_the_schema_takes_both_spellings_and_offers_one() -> None:
    for section in schema()["$defs"].values():
        for key in section["properties"]:
            patterns = [pattern for pattern in section.get("patternProperties", {}) if re.search(pattern, key)]
            assert patterns == []
            for other in {key.replace("-", "_"), key.replace("_", "-")} - {key}:
                found = [part for pattern, part in section["patternProperties"].items() if re.search(pattern, other)]
                assert found == [section["properties"][key]]
                assert not any(
                    re.search(pattern, wrong)
                    for wrong in (f"x{other}", f"{other}x")
                    for pattern in section["patternProperties"]
                )
