"""The configuration: every default, the older style, and what is refused, where, with what beside it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from splitlm.core.config import RunConfig, read, resolved
from splitlm.core.config_check import leaves
from splitlm.core.config_tree import bare, every_path
from splitlm.core.errors import UsageError

OLDER = """
name: Older
server:
  global-round: 2
  clients: [1, 1]
  cut-layers: 4
  model-name: Bert # GPT2/Llama/Bert
  data-name: EMOTION
  model:
    GPT2:
      n_block: 12
    Llama:
      n_block: 16
    Bert:
      n_block: 8
  parameters:
    load: True
    save: False
  validation: False
  data-distribution:
    non-iid: False
    num-sample: 500
    num-label: 10
    dirichlet:
      alpha: 1
    refresh-each-round: True
  random-seed: 7

rabbit:
  address: 10.0.0.5
  username: admin
  password: hush-hush
  virtual-host: /lab

log_path: logs
debug_mode: True

learning:
  learning-rate: 1e-4
  weight-decay: 0.02
  batch-size: 4
  control-count: 3
  clip-grad-norm: 0.0

fine-tune:
  name: LoRA
  LoRA:
    r: 4
    alpha: 12
"""
DEFAULTS: dict[str, object] = {
    "name": "splitlm",
    "server.global-round": 1,
    "server.clients": (1, 1),
    "server.architecture": "u-shape",
    "server.cut-layers": 1,
    "server.tail-blocks": 0,
    "server.model-name": "Bert",
    "server.model-path": None,
    "server.data-name": "EMOTION",
    "server.data-path": None,
    "server.parameters.load": True,
    "server.parameters.save": True,
    "server.validation": True,
    "server.evaluation-answers": 32,
    "server.data-distribution.non-iid": False,
    "server.data-distribution.num-sample": None,
    "server.data-distribution.num-label": None,
    "server.data-distribution.dirichlet.alpha": 1.0,
    "server.data-distribution.refresh-each-round": False,
    "server.random-seed": 1,
    "server.aggregator": None,
    "server.bus": None,
    "rabbit.address": "127.0.0.1",
    "rabbit.port": None,
    "rabbit.username": "guest",
    "rabbit.password": "guest",
    "rabbit.virtual-host": "/",
    "rabbit.tls": False,
    "log_path": ".",
    "debug_mode": False,
    "learning.learning-rate": 1e-5,
    "learning.weight-decay": 0.01,
    "learning.batch-size": 2,
    "learning.control-count": 1,
    "learning.clip-grad-norm": 0.0,
    "learning.loss-weighting": "microbatch",
    "learning.body-sync": "round",
    "learning.u-shape.transport": "tcp",
    "learning.u-shape.pinned-memory": "auto",
    "learning.u-shape.pool-bytes": 67108864,
    "learning.u-shape.transport-queue-size": 32,
    "learning.u-shape.adaptive-weights": True,
    "learning.u-shape.max-inflight": 2,
    "learning.u-shape.microbatches-per-window": 8,
    "learning.u-shape.worker-max-inflight": 8,
    "learning.u-shape.timeout-seconds": 120.0,
    "fine-tune.name": "full",
    "fine-tune.LoRA.r": 8,
    "fine-tune.LoRA.alpha": 16.0,
    "fine-tune.LoRA.aggregate": "factors",
    "fine-tune.freeze-embeddings": "auto",
    "optimizer.reset-each-round": False,
    "security.tls": "auto",
    "security.certs": None,
    "privacy.noise": 0.0,
}


def nested(path: str, value: object) -> dict[str, Any]:
    """A file that sets one key."""
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def refused(mapping: Any, *words: str, kind: type[UsageError] = UsageError) -> str:
    """The paragraph with which a file is refused, on reading or on checking; it holds these words."""
    with pytest.raises(UsageError) as caught:
        read(mapping, "c.yaml").check()
    assert type(caught.value) is kind
    text = str(caught.value)
    assert "\n" not in text and text.startswith("c.yaml:")
    for word in words:
        assert word in text
    return text


@pytest.mark.parametrize("mapping", [None, {}, {"server": None, "learning": {"u-shape": None}}])
def test_every_key_has_its_default(mapping: Any) -> None:
    config = read(mapping, "c.yaml")
    config.check()
    assert {path: value for path, value, _ in leaves(config)} == DEFAULTS
    assert config.server.model == {}
    assert config == RunConfig(given=config.given, where="c.yaml")


def test_an_older_file_works_as_it_stands() -> None:
    config = read(yaml.safe_load(OLDER), "older.yaml")
    config.check()
    server, learning = config.server, config.learning
    assert (config.name, config.log_path, config.debug_mode) == ("Older", "logs", True)
    assert (server.global_round, server.clients, server.owners, server.workers) == (2, (1, 1), 1, 1)
    assert (server.cut_layers, server.model_name, server.data_name, config.n_block) == (4, "Bert", "EMOTION", 8)
    assert (server.parameters.load, server.parameters.save, server.validation) == (True, False, False)
    spread = server.data_distribution
    assert (spread.non_iid, spread.num_sample, spread.num_label) == (False, 500, 10)
    assert (spread.dirichlet.alpha, spread.refresh_each_round, server.random_seed) == (1.0, True, 7)
    assert (config.rabbit.address, config.rabbit.username, config.rabbit.virtual_host) == ("10.0.0.5", "admin", "/lab")
    assert config.rabbit.password == "hush-hush" and config.rabbit.reached_at == ("10.0.0.5", 5672)
    assert (learning.learning_rate, learning.weight_decay, learning.batch_size) == (1e-4, 0.02, 4)
    assert (learning.control_count, learning.clip_grad_norm) == (3, 0.0)
    assert (config.fine_tune.name, config.fine_tune.lora.r, config.fine_tune.lora.alpha) == ("LoRA", 4, 12.0)
    assert config.shape.name == "u-shape" and config.credit == 2
    assert config.unused == (
        "server.model.GPT2.n_block",
        "server.model.Llama.n_block",
        "server.data-distribution.dirichlet.alpha",
        "learning.control-count",
    )
    assert config.bus(local=True) == "star" and config.bus(local=False) == "rabbitmq"


@pytest.mark.parametrize("path", sorted(DEFAULTS))
def test_both_spellings_of_a_key_are_one(path: str) -> None:
    value = DEFAULTS[path]
    for spelling in (path.replace("-", "_"), path.replace("_", "-")):
        config = read(nested(spelling, list(value) if isinstance(value, tuple) else value), "c.yaml")
        assert path in config.given
        assert {at: found for at, found, _ in leaves(config)}[path] == value
    if "-" in path.rpartition(".")[2]:
        above, _, key = path.rpartition(".")
        both = {key: value, key.replace("-", "_"): value}
        refused(nested(above, both) if above else both, path, "twice")


def test_what_yaml_reads_otherwise_is_what_it_looks_like() -> None:
    text = "{learning: {learning-rate: 3e-5, u-shape: {pinned-memory: on}}, security: {tls: off}}"
    config = read(yaml.safe_load(text), "c.yaml")
    assert config.learning.learning_rate == 3e-5
    assert config.learning.u_shape.pinned_memory == "on" and config.security.tls == "off"
    assert read({"security": {"tls": True}}, "c.yaml").security.tls == "on"
    refused({"learning": {"learning-rate": "3e-5x"}}, "learning.learning-rate", "'3e-5x'", "a finite number")
    refused({"learning": {"batch-size": "1e1"}}, "learning.batch-size", "a whole number")
    refused({"server": {"bus": True}}, "server.bus", "star")


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("server.clint", "server.clients."),
        ("batch-size", "learning.batch-size."),
        ("server.n_block", "server.model.<name>.n_block."),
        ("learning.u-shap.transport", "learning.u-shape."),
        ("fine-tune.lora", "fine-tune.LoRA."),
        ("fine-tune.LoRA.rank", "fine-tune.LoRA.r."),
        ("server.model.Bert.blocks", "server.model.Bert.n_block."),
        ("servr", "server."),
        ("learning.given", "."),
        ("given", "."),
        ("where", "."),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(path: str, near: str) -> None:
    at = path.removesuffix(".transport")
    assert refused(nested(path, 1), f"c.yaml:{at}: ", f"'{at}'").endswith(near)


def test_a_key_that_is_no_text_is_refused() -> None:
    refused({True: 1}, "True")
    refused({"server": {3: 1}}, "server.3")
    refused({"server": {"model": {3: {}}}}, "server.model.3")
    with pytest.raises(UsageError, match="mapping"):
        read([1], "c.yaml")  # type: ignore[arg-type]


KNOWN = {part for path in every_path() for part in (path.rpartition(".")[2].replace("_", "-"),)}


@given(
    section=st.sampled_from(["", *(path for path in every_path() if any(p.startswith(path + ".") for p in DEFAULTS))]),
    key=st.text(max_size=100),
    value=st.none() | st.integers() | st.text() | st.lists(st.integers()),
)
@example(section="server.parameters", key=".LA", value=None)  # a dot of its own
def test_no_unknown_key_passes(section: str, key: str, value: object) -> None:
    if key.replace("_", "-") in KNOWN:
        return
    mapping = {key: value} if not section else nested(section, {key: value})
    with pytest.raises(UsageError) as caught:
        read(mapping, "c.yaml")
    assert caught.value.where.startswith(f"c.yaml:{section}")
    named = caught.value.remedy.removeprefix("The nearest known key is ")
    assert named in every_path()


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.lists(st.integers(), max_size=3)
    | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)
)
FITS: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}


@given(path=st.sampled_from([path for path in DEFAULTS if DEFAULTS[path] is not None]), value=SCALARS)
def test_a_value_of_another_type_never_passes(path: str, value: object) -> None:
    default = DEFAULTS[path]
    _, _, words = bare(next(kind for at, _, kind in leaves(RunConfig()) if at == path))
    try:
        config = read(nested(path, value), "c.yaml")
    except UsageError as error:
        assert error.where == f"c.yaml:{path}" and path in str(error) and error.expected
        return
    found = {at: one for at, one, _ in leaves(config)}[path]
    assert type(found) is type(default)
    if not (words and isinstance(value, bool)):
        assert found == (tuple(value) if isinstance(value, list) else value)
        assert isinstance(value, list) or (type(value) in FITS[type(default)])


def test_a_wrong_type_is_named_with_what_it_should_be() -> None:
    refused({"server": {"clients": [1, 2, 3]}}, "c.yaml:server.clients: ", "[1, 2, 3]", "two whole numbers")
    refused({"server": {"clients": [True, 1]}}, "server.clients")
    refused({"server": {"global-round": 1.5}}, "1.5", "a whole number")
    refused({"server": {"global-round": True}}, "True", "a whole number")
    refused({"debug_mode": 1}, "debug_mode", "true or false")
    for number in (float("nan"), float("inf"), "1e999"):
        with pytest.raises(UsageError, match="a finite number"):
            read({"learning": {"clip-grad-norm": number}}, "c.yaml")
    refused({"learning": {"learning-rate": 10**400}}, "a huge number", "a finite number")
    refused({"server": 3}, "server cannot be 3", "mapping")
    refused({"server": {"model": ["Bert"]}}, "server.model", "mapping")
    refused({"name": None}, "name cannot be None", "text")
    refused({"name": {"a": {"b": 1}}}, "a mapping")
    refused({"name": "x"} | {"log_path": [[1] * 9] * 9}, "a list of 9")


def test_a_password_is_in_no_message_and_in_no_stored_file() -> None:
    assert "12345" not in refused({"rabbit": {"password": 12345}}, "rabbit.password", "text")
    assert "hush" not in refused({"rabbit": "amqp://me:hush@host"}, "rabbit", "mapping")
    assert "hush" not in refused({"rabbit": {"address": "me:hush@host"}}, "rabbit.address", "a host alone")
    stored = resolved(read(yaml.safe_load(OLDER), "c.yaml"))
    assert "hush" not in str(stored) and "password" not in str(stored)
    assert stored["rabbit"]["address"] == "10.0.0.5"  # type: ignore[index]
