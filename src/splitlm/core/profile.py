"""Measured numbers that a cut is planned from: what a model weighs, what a device takes, what a link costs.

A profiles document (``profiles.json``) holds one model and the devices, in the order of the ring, that were measured
with it. Reading and writing the file is for ``cli``; here are its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from splitlm.core.errors import UsageError

SCHEMA: Literal["splitlm-profiles/1"] = "splitlm-profiles/1"


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured: times of another model, element type or engine say nothing about this one.

    Attributes:
        config_hash: SHA-256 of the model's config.
        dtype: element type of the weights.
        compute: engine.
    """

    config_hash: str
    dtype: str
    compute: str

    def __str__(self) -> str:
        return f"{self.config_hash[:12]} {self.dtype} {self.compute}"


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a model weighs.

    Attributes:
        name: as the user calls it.
        identity: what makes two profiles comparable.
        blocks: number of blocks.
        block_bytes: weights of one block (of the largest, where they differ).
        embed_bytes: embedding, and learned positions where there are any.
        head_bytes: final norm and head; the table included even where it is tied.
        tied_bytes: of ``head_bytes``, what a node that holds the embedding too does not hold twice; 0 when untied.
        kv_bytes: keys and values per token and block.
        hidden_bytes: one token's hidden state.
        windows: rows that a block keeps at most, one per block, 0 for no bound; empty: no block has a bound.
    """

    name: str
    identity: Identity
    blocks: int
    block_bytes: int
    embed_bytes: int
    head_bytes: int
    kv_bytes: int
    hidden_bytes: int
    tied_bytes: int = 0
    windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        counts = ("block_bytes", "embed_bytes", "head_bytes", "kv_bytes", "tied_bytes")
        _at_least(self, "model", 0, counts)
        _at_least(self, "model", 1, ("blocks", "hidden_bytes"))
        if self.windows and (len(self.windows) != self.blocks or min(self.windows) < 0):
            raise UsageError(
                f"windows are {list(self.windows)}", where="model.windows", expected=f"{self.blocks} counts from 0 on"
            )
        if self.tied_bytes > self.head_bytes:
            raise UsageError(
                f"tied_bytes is {self.tied_bytes}", where="model.tied_bytes", expected=f"at most {self.head_bytes}"
            )


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one device takes for a decode step at batch 1, and what it can hold.

    Attributes:
        name: of the device; its node's name in a plan.
        measured: the model, element type and engine that the times belong to.
        memory_bytes: budget for weights and KV.
        block_ms: one block.
        embed_ms: the embedding.
        head_ms: final norm, head and the choice of a token.
        fixed_ms: a step's cost besides these, once per segment.
        threads: intra-op threads it was measured with.
        context_tokens: KV length at which it was measured.
    """

    name: str
    measured: Identity
    memory_bytes: int
    block_ms: float
    embed_ms: float = 0.0
    head_ms: float = 0.0
    fixed_ms: float = 0.0
    threads: int = 1
    context_tokens: int = 0

    def __post_init__(self) -> None:
        where = f"devices[{self.name}]"
        if not self.name:
            raise UsageError("A device has no name", where="devices", expected="a name")
        _at_least(self, where, 0, ("memory_bytes", "embed_ms", "head_ms", "fixed_ms", "context_tokens"))
        _at_least(self, where, 1, ("threads",))
        if not 0 < self.block_ms < math.inf:
            raise UsageError(
                f"block_ms is {self.block_ms}", where=f"{where}.block_ms", expected="a positive number of milliseconds"
            )


class LinkProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way from device to device.

    Attributes:
        source: the device that sends.
        target: the device that receives.
        latency_ms: one way, of a frame without tensors, from the end of compute to the start of the next.
        bytes_per_s: rate beyond that.
    """

    source: str
    target: str
    latency_ms: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        where = f"links[{self.source}→{self.target}]"
        _at_least(self, where, 0, ("latency_ms",))
        if not 0 < self.bytes_per_s < math.inf:
            raise UsageError(
                f"bytes_per_s is {self.bytes_per_s}", where=f"{where}.bytes_per_s", expected="a positive number"
            )


class Profiles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model and the devices that were measured with it, in the order of the ring; the first is the head."""

    model: ModelProfile
    devices: tuple[DeviceProfile, ...]
    links: tuple[LinkProfile, ...] = ()
    schema: Literal["splitlm-profiles/1"] = SCHEMA

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for device in self.devices:
            if device.name in seen:
                raise UsageError(
                    f"Two devices are called {device.name!r}",
                    where=f"devices[{device.name}].name",
                    expected="a name of its own for each",
                    remedy="Measure one of them again with another --device",
                )
            seen.add(device.name)
            if device.measured != self.model.identity:
                raise UsageError(
                    f"The device was measured with {device.measured}",
                    where=f"devices[{device.name}].measured",
                    expected=f"{self.model.identity}, as model.identity says",
                    remedy="Measure it again with this model, --dtype and --compute",
                )
        for link in self.links:
            if lost := {link.source, link.target} - seen:
                raise UsageError(
                    f"There is no device {min(lost)!r}",
                    where=f"links[{link.source}→{link.target}]",
                    expected=f"one of {', '.join(sorted(seen)) or 'no device'}",
                )

    def pick(self, names: Sequence[str]) -> tuple[DeviceProfile, ...]:
        """The devices of these names, in this order.

        Raises:
            UsageError: a name that no device has.
        """
        by_name = {device.name: device for device in self.devices}
        for name in names:
            if name not in by_name:
                raise UsageError(
                    f"There is no device {name!r}", where="devices", expected=f"one of {', '.join(by_name)}"
                )
        return tuple(by_name[name] for name in names)

    def link(self, source: str, target: str) -> LinkProfile | None:
        """The way between two devices, the way back where only that was measured, else None."""
        ways: Mapping[tuple[str, str], LinkProfile] = {(way.source, way.target): way for way in self.links}
        back = ways.get((target, source))
        return ways.get((source, target)) or (
            msgspec.structs.replace(back, source=source, target=target) if back is not None else None
        )


def encode(profiles: Profiles) -> bytes:
    """A profiles document, indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(profiles), indent=2) + b"\n"


def decode(data: bytes, file: str = "profiles.json") -> Profiles:
    """A profiles document from its bytes.

    Raises:
        UsageError: not JSON, an unknown key, or a value out of range; ``file:key`` is named.
    """
    try:
        return msgspec.json.decode(data, type=Profiles)
    except UsageError as error:
        raise UsageError(
            error.what, where=f"{file}:{error.where}", expected=error.expected, remedy=error.remedy
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        what, _, path = str(error).partition(" - at `$")
        raise UsageError(
            what.rstrip("."),
            where=":".join(filter(None, (file, path.rstrip("`").lstrip(".")))),
            expected=f"a document of schema {SCHEMA}",
            remedy="Make it with: splitlm plan MODEL --measure --out FILE",
        ) from error


def merge(documents: Sequence[tuple[str, Profiles]]) -> Profiles:
    """Documents of several machines as one, devices in the order given.

    Args:
        documents: each with the file name that errors call it by.

    Raises:
        UsageError: no document, different models, or a device name used twice.
    """
    if not documents:
        raise UsageError("There is nothing to merge", where="--merge", expected="at least one file")
    first_file, first = documents[0]
    for file, other in documents[1:]:
        for key in ModelProfile.__struct_fields__:
            ours, theirs = getattr(first.model, key), getattr(other.model, key)
            if key != "name" and ours != theirs:
                raise UsageError(
                    f"It was measured with {theirs}",
                    where=f"{file}:model.{key}",
                    expected=f"{ours}, as in {first_file}",
                    remedy="Measure both with the same model, --dtype and --compute",
                )
    try:
        return Profiles(
            model=first.model,
            devices=tuple(device for _, other in documents for device in other.devices),
            links=tuple(link for _, other in documents for link in other.links),
        )
    except UsageError as error:
        where = f"{'+'.join(file for file, _ in documents)}:{error.where}"
        raise UsageError(error.what, where=where, expected=error.expected, remedy=error.remedy) from error


def _at_least(owner: msgspec.Struct, where: str, least: int, keys: tuple[str, ...]) -> None:
    for key in keys:
        value = getattr(owner, key)
        if not least <= value < math.inf:
            raise UsageError(f"{key} is {value}", where=f"{where}.{key}", expected=f"a number from {least} on")
