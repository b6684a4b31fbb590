"""Profiles: what is refused and how it is named, and that a document survives its own bytes."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest

from splitlm.core.errors import UsageError
from splitlm.core.profile import DeviceProfile, Identity, LinkProfile, ModelProfile, Profiles, decode, encode, merge

WHO = Identity(config_hash="0123456789abcdef", dtype="float32", compute="exact")
MODEL = ModelProfile(
    name="m",
    identity=WHO,
    blocks=3,
    block_bytes=100,
    embed_bytes=10,
    head_bytes=20,
    kv_bytes=2,
    hidden_bytes=64,
    tied_bytes=10,
    windows=(0, 7, 0),
)


def device(name: str, **changed: Any) -> DeviceProfile:
    return DeviceProfile(**{"name": name, "measured": WHO, "memory_bytes": 1000, "block_ms": 1.5, **changed})


def link(source: str, target: str, **changed: Any) -> LinkProfile:
    return LinkProfile(**{"source": source, "target": target, "latency_ms": 0.2, "bytes_per_s": 1e8, **changed})


DOCUMENT = Profiles(model=MODEL, devices=(device("a"), device("b", threads=4)), links=(link("a", "b"),))


def test_a_document_survives_its_bytes() -> None:
    data = encode(DOCUMENT)
    assert decode(data) == DOCUMENT
    assert json.loads(data)["schema"] == "splitlm-profiles/1"
    assert data.endswith(b"}\n")
    assert b'\n  "model"' in data  # for people to read and edit


def edited(*keys: str | int, value: Any) -> bytes:
    """The document with one value changed, or (``...``) removed."""
    data = json.loads(encode(DOCUMENT))
    at = data
    for key in keys[:-1]:
        at = at[key]
    if value is ...:
        del at[keys[-1]]
    else:
        at[keys[-1]] = value
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    ("keys", "value", "where"),
    [
        (("schema",), "splitlm-profiles/2", "p.json:schema"),
        (("surprise",), 1, "p.json"),
        (("model", "blocks"), "3", "p.json:model.blocks"),
        (("model", "blocks"), 0, "p.json:model.blocks"),
        (("model", "block_bytes"), -1, "p.json:model.block_bytes"),
        (("model", "hidden_bytes"), 0, "p.json:model.hidden_bytes"),
        (("model", "tied_bytes"), 21, "p.json:model.tied_bytes"),
        (("model", "windows"), [1, 2], "p.json:model.windows"),
        (("model", "windows"), [1, 2, -1], "p.json:model.windows"),
        (("devices", 1, "block_ms"), 0, "p.json:devices[b].block_ms"),
        (("devices", 1, "block_ms"), "fast", "p.json:devices[1].block_ms"),
        (("devices", 1, "block_ms"), ..., "p.json:devices[1]"),
        (("devices", 0, "head_ms"), -0.5, "p.json:devices[a].head_ms"),
        (("devices", 0, "memory_bytes"), -1, "p.json:devices[a].memory_bytes"),
        (("devices", 0, "threads"), 0, "p.json:devices[a].threads"),
        (("devices", 0, "name"), "", "p.json:devices"),
        (("devices", 0, "name"), "b", "p.json:devices[b].name"),
        (("devices", 0, "measured", "dtype"), "bfloat16", "p.json:devices[a].measured"),
        (("links", 0, "bytes_per_s"), 0, "p.json:links[a→b].bytes_per_s"),
        (("links", 0, "latency_ms"), -1, "p.json:links[a→b].latency_ms"),
        (("links", 0, "target"), "c", "p.json:links[a→c]"),
    ],
)
def test_what_is_wrong_is_named_by_file_and_key(keys: tuple[str | int, ...], value: Any, where: str) -> None:
    with pytest.raises(UsageError) as failed:
        decode(edited(*keys, value=value), "p.json")
    assert failed.value.where == where
    assert failed.value.expected


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b'{"a":' * 5000])
def test_what_is_no_document_is_refused(data: bytes) -> None:
    with pytest.raises(UsageError) as failed:
        decode(data, "p.json")
    assert failed.value.where.startswith("p.json")
    assert "--measure" in str(failed.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_time_is_a_finite_number(value: float) -> None:
    for key in ("block_ms", "embed_ms", "head_ms", "fixed_ms"):
        with pytest.raises(UsageError, match=key):
            device("a", **{key: value})


def test_a_link_serves_both_ways_where_the_way_back_was_not_measured() -> None:
    back = link("b", "a", latency_ms=9)
    assert DOCUMENT.link("a", "b") == link("a", "b")
    assert DOCUMENT.link("b", "a") == link("b", "a")
    both = Profiles(model=MODEL, devices=DOCUMENT.devices, links=(*DOCUMENT.links, back))
    assert both.link("b", "a") == back
    assert both.link("a", "b") == link("a", "b")
    assert Profiles(model=MODEL, devices=DOCUMENT.devices).link("a", "b") is None


def test_devices_are_picked_in_the_order_asked_for() -> None:
    assert [d.name for d in DOCUMENT.pick(["b", "a"])] == ["b", "a"]
    with pytest.raises(UsageError, match="'c'"):
        DOCUMENT.pick(["a", "c"])


def one(name: str, **changed: Any) -> Profiles:
    return Profiles(model=MODEL, devices=(device(name, **changed),))


def test_documents_of_several_machines_become_one_in_their_order() -> None:
    both = merge([("x.json", one("b")), ("y.json", one("a"))])
    assert [d.name for d in both.devices] == ["b", "a"]
    assert both.model == MODEL
    assert merge([("x.json", DOCUMENT)]) == DOCUMENT
    assert merge([("x.json", DOCUMENT), ("y.json", one("c"))]).links == DOCUMENT.links


def test_a_device_measured_twice_or_with_another_model_is_refused() -> None:
    with pytest.raises(UsageError) as twice:
        merge([("x.json", one("a")), ("y.json", one("a"))])
    assert twice.value.where == "x.json+y.json:devices[a].name"
    assert "--device" in str(twice.value)
    heavier = msgspec.structs.replace(one("b"), model=msgspec.structs.replace(MODEL, block_bytes=101))
    with pytest.raises(UsageError) as other:
        merge([("x.json", one("a")), ("y.json", heavier)])
    assert other.value.where == "y.json:model.block_bytes"
    assert "101" in str(other.value) and "100, as in x.json" in str(other.value)
    with pytest.raises(UsageError, match="nothing to merge"):
        merge([])


def test_a_models_name_does_not_have_to_agree() -> None:
    elsewhere = msgspec.structs.replace(one("b"), model=msgspec.structs.replace(MODEL, name="/models/m"))
    assert merge([("x.json", one("a")), ("y.json", elsewhere)]).model.name == "m"
