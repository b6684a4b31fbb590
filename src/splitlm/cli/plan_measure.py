"""Cutting by measured times: ``splitlm plan --measure``, ``--merge`` and ``--plan-from``, which ``generate`` takes too.

Each machine measures itself with the same model, element type and engine, and under a name of its own; one of them then
merges the files, in the order of the ring::

    on each machine   splitlm plan MODEL --measure --device NAME --out NAME.json
    on the head       splitlm plan MODEL --merge head.json --merge second.json --out profiles.json
    and then          splitlm plan MODEL --plan-from profiles.json --sessions 4

The file is JSON and made to be edited: ``links`` takes measured or known latencies and rates, ``memory_bytes`` a
smaller budget, and the order of ``devices`` is the order of the ring.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from splitlm.cli import options as o
from splitlm.cli.console import Console
from splitlm.cli.interrupts import held
from splitlm.cli.tables import table
from splitlm.core.cut import Cut
from splitlm.core.errors import UsageError
from splitlm.core.profile import Identity, LinkProfile, Profiles, decode, encode, merge
from splitlm.planner.cost import Prediction, Ring, node_bytes, predict
from splitlm.planner.partition import partition
from splitlm.telemetry.folder import write_whole

MIB = 2**20
COMPUTE = "exact"
LINK_MS, LINK_MB_S = 0.3, 117.0
"""A wired local network at one gigabit per second: what a link is taken for until it is measured."""

SESSIONS_HELP = "With --plan-from: sessions that decode at once; one asks for the shortest lap, several for balance."


@dataclass(frozen=True)
class TimesOptions:
    """A cut by measured times, as any verb with ``--plan-from`` takes it."""

    plan_from: Annotated[Path | None, typer.Option(help="Cut by the times in this file (splitlm plan --out).")] = None
    context_tokens: Annotated[
        int, typer.Option("--context", help="With --plan-from: tokens of KV to find room for, per session.")
    ] = 2048
    link_ms: Annotated[float, typer.Option(help="With --plan-from: latency of links that the file lacks.")] = LINK_MS
    link_mb_s: Annotated[float, typer.Option(help="Their rate, in 10⁶ bytes per second.")] = LINK_MB_S


@dataclass(frozen=True)
class MeasureOptions(TimesOptions):
    """What ``splitlm plan`` takes besides the cut."""

    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine with MODEL.")] = False
    device: Annotated[str, typer.Option(help="With --measure: name of this machine (default: its host name).")] = ""
    memory: Annotated[
        int, typer.Option(help="With --measure: MiB for weights and KV; 0 takes most of what is free.")
    ] = 0
    merge: Annotated[list[Path] | None, typer.Option(help="Files of other machines, in the order of the ring.")] = None
    out: Annotated[Path | None, typer.Option(help="With --measure or --merge: file to write.")] = None
    sessions: Annotated[int, typer.Option(help=SESSIONS_HELP)] = 1


@dataclass(frozen=True)
class Planned:
    """A cut chosen from profiles, and why.

    Attributes:
        assumed: links that were not measured, as ``a→b``.
    """

    cut: Cut
    ring: Ring
    prediction: Prediction
    assumed: tuple[str, ...]

    @property
    def cuts(self) -> tuple[int, ...]:
        """As ``--cuts`` and ``splitlm.Ring`` take them."""
        return self.cut.boundaries[:-1] if self.cut.private else self.cut.boundaries


def by_times(voice: Console, model: str, cut: o.CutOptions, options: MeasureOptions, *, as_json: bool) -> bool:
    """Do what the options ask for; False when they ask for nothing, and ``splitlm plan`` goes on as without them.

    Raises:
        UsageError: options that exclude each other, or see ``measured``, ``planned`` and ``check_identity``.
    """
    making = options.measure or options.merge or options.out is not None
    if making and options.plan_from is not None:
        raise UsageError("Measuring and planning were both asked for", where="--plan-from", expected="one at a time")
    if making:
        profiles = measured(model, cut, options, voice)
        voice.json(msgspec.to_builtins(profiles)) if as_json else show_profiles(voice, profiles)
        return True
    if options.plan_from is None:
        return False
    made = plan_from(options.plan_from, model, cut, options, voice, sessions=options.sessions)
    voice.json(as_data(made)) if as_json else show(voice, made)
    return True


def plan_from(
    file: Path, model: str, cut: o.CutOptions, options: TimesOptions, voice: Console, *, sessions: int
) -> Planned:
    """The cut for a model by the times in a file, as any verb with ``--plan-from`` chooses it.

    Raises:
        UsageError: the file is of another model, or cuts were given too; see ``planned`` for the rest.
    """
    if cut.cuts:
        raise UsageError("Cuts were given too", where="--plan-from", expected="one of --cuts and --plan-from")
    profiles = read(file)
    with held():
        from splitlm.model.load import ModelFiles
        from splitlm.model.profile import identity
        from splitlm.model.source import resolve

    files = ModelFiles(resolve(model, progress=voice.say), family=cut.family, dtype=cut.dtype)
    check_identity(profiles, identity(files, COMPUTE), file)
    return planned(
        profiles, options, sessions=sessions, stages=cut.stages, private=cut.private, tail_blocks=cut.tail_blocks
    )


def measured(model: str, cut: o.CutOptions, options: MeasureOptions, voice: Console, *, threads: int = 0) -> Profiles:
    """This machine's profile, if it is asked for, and those of the files to merge; written where asked.

    Raises:
        UsageError: nothing to measure or to merge, or files that do not go together.
        ModelError: the model cannot be read.
    """
    if not options.measure and not options.merge:
        raise UsageError("Nothing was measured", where="--out", expected="--measure or --merge with it")
    documents = [("--measure", _measure(model, cut, options, voice, threads))] if options.measure else []
    documents += [(str(path), read(path)) for path in options.merge or ()]
    profiles = merge(documents)
    if options.out is not None:
        write(options.out, profiles)
        voice.say(f"wrote {options.out}")
    return profiles


def planned(
    profiles: Profiles,
    options: TimesOptions,
    *,
    sessions: int = 1,
    stages: int | None = None,
    private: bool = False,
    tail_blocks: int = 0,
) -> Planned:
    """The best cut over the first ``stages`` devices of a document, or over all.

    Raises:
        UsageError: fewer devices than stages, or an option out of range.
        CutError: too little memory, or more devices than blocks.
    """
    o.at_least(1, sessions, "--sessions")
    o.at_least(0, options.context_tokens, "--context")
    count = len(profiles.devices) if stages is None else stages
    if not 1 <= count <= len(profiles.devices):
        raise UsageError(
            f"{count} stages and {len(profiles.devices)} devices",
            where="--stages",
            expected=f"at least 1 and at most {len(profiles.devices)}",
            remedy="Measure more machines, and --merge their files",
        )
    devices = profiles.devices[:count]
    links, assumed = [], []
    for a, b in zip(devices, (*devices[1:], devices[0]), strict=True) if count > 1 else ():
        link = profiles.link(a.name, b.name)
        if link is None:
            assumed.append(f"{a.name}→{b.name}")
            rate = options.link_mb_s * 1e6
            link = LinkProfile(source=a.name, target=b.name, latency_ms=options.link_ms, bytes_per_s=rate)
        links.append(link)
    ring = Ring(
        model=profiles.model,
        devices=devices,
        links=tuple(links),
        sessions=sessions,
        context_tokens=options.context_tokens,
        private=private,
        tail_blocks=tail_blocks,
    )
    cut = partition(ring)
    return Planned(cut, ring, predict(ring, cut), tuple(assumed))


def check_identity(profiles: Profiles, wanted: Identity, file: Path) -> None:
    """Whether the times are those of the model that is to be cut.

    Raises:
        UsageError: they are not; both are named.
    """
    for key in Identity.__struct_fields__:
        was, now = getattr(profiles.model.identity, key), getattr(wanted, key)
        if was != now:
            raise UsageError(
                f"It was measured with {was}",
                where=f"{file}:model.identity.{key}",
                expected=f"{now}, as this model and its options have it",
                remedy="Measure again with --measure",
            )


def show_profiles(voice: Console, profiles: Profiles) -> None:
    """Print what was measured."""
    model = profiles.model
    voice.out(f"{model.name}: {model.blocks} blocks of {model.block_bytes / MIB:,.1f} MiB, {model.identity}")
    rows = [
        [
            d.name,
            *(f"{ms:.3f}" for ms in (d.block_ms, d.embed_ms, d.head_ms, d.fixed_ms)),
            f"{d.memory_bytes / MIB:,.0f}",
        ]
        for d in profiles.devices
    ]
    table(voice, ["device", "block ms", "embedding ms", "head ms", "fixed ms", "memory MiB"], rows)


def show(voice: Console, made: Planned) -> None:
    """Print the cut and what it is expected to take."""
    expected, ring, sizes = made.prediction, made.ring, node_bytes(made.ring, made.cut)
    kind = "the shortest lap" if expected.objective == "sum" else f"{ring.sessions} sessions in balance"
    edges = ",".join(map(str, made.cuts)) or "none"
    voice.out(f"{ring.model.name}: {'private, ' if ring.private else ''}cuts {edges}, for {kind}")
    rows = []
    for node, device in enumerate(ring.devices):
        held = "; ".join(map(str, made.cut.held_by(node)))
        hop = f"{expected.hop_ms[node]:.2f}" if expected.hop_ms else ""
        use = f"{sizes[node] / MIB:,.0f} of {device.memory_bytes / MIB:,.0f}"
        rows.append([device.name, held, f"{expected.compute_ms[node]:.2f}", hop, use])
    table(voice, ["device", "holds", "compute ms", "hop ms", "memory MiB"], rows, left=2)
    voice.out(
        f"Expected: lap {expected.lap_ms:.1f} ms, busiest {expected.bottleneck_ms:.1f} ms, "
        f"{expected.tokens_per_s:.1f} tokens/s in all."
    )
    say_assumed(voice, made)


def say_assumed(voice: Console, made: Planned) -> None:
    """Say for which links a number was taken that nobody measured."""
    if made.assumed:
        links = made.ring.links
        first = links[0] if len(made.assumed) == len(links) else None
        what = f" to take {first.latency_ms:g} ms and carry {first.bytes_per_s / 1e6:g} MB/s" if first else ""
        voice.say(f"not measured, assumed{what}: {', '.join(made.assumed)}")


def as_data(made: Planned) -> dict[str, object]:
    """The plan as JSON values."""
    data: dict[str, object] = msgspec.to_builtins(made.prediction)
    return data | {
        "cuts": list(made.cuts),
        "private": made.ring.private,
        "sessions": made.ring.sessions,
        "tokens_per_s": made.prediction.tokens_per_s,
        "devices": [device.name for device in made.ring.devices],
        "bytes": list(node_bytes(made.ring, made.cut)),
        "assumed_links": list(made.assumed),
    }


def read(path: Path) -> Profiles:
    """A profiles document from a file.

    Raises:
        UsageError: it cannot be read, or is none; ``file:key`` is named.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"The file cannot be read ({error.strerror})", where=str(path), expected="a file that --out wrote"
        ) from error
    return decode(data, str(path))


def write(path: Path, profiles: Profiles) -> None:
    """A profiles document into a file: whole, or not at all.

    Raises:
        UsageError: the folder does not take it.
    """
    try:
        write_whole(path, encode(profiles))
    except OSError as error:
        raise UsageError(f"The file cannot be written ({error.strerror})", where=f"--out {path}") from error


def _measure(model: str, cut: o.CutOptions, options: MeasureOptions, voice: Console, threads: int) -> Profiles:
    import asyncio
    from functools import partial

    from splitlm.model.load import ModelFiles
    from splitlm.model.runner import Runner
    from splitlm.model.source import resolve
    from splitlm.node.probe import measure_device

    files = ModelFiles(resolve(model, progress=voice.say), family=cut.family, dtype=cut.dtype)
    name = options.device or socket.gethostname()
    voice.say(f"measuring {name}")
    memory = o.at_least(0, options.memory, "--memory") * MIB
    runner = Runner(o.ring_threads(threads, 1))
    try:
        probe = partial(measure_device, files, name=name, compute=COMPUTE, model=model, memory_bytes=memory)
        profile, device = asyncio.run(runner.run(probe))
    finally:
        runner.close()
    return Profiles(model=profile, devices=(device,))
