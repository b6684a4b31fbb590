"""Measuring what a plan needs: what this machine takes per block, and what a link to another costs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from statistics import median

import torch

from splitlm.core.cut import Segment
from splitlm.core.errors import PeerLostError, ProtocolError, UsageError
from splitlm.core.profile import DeviceProfile, LinkProfile, ModelProfile
from splitlm.core.sampling import Sampling
from splitlm.model.load import ModelFiles
from splitlm.model.profile import identity, model_profile
from splitlm.model.stage import Stage, build_stages
from splitlm.wire.channel import Channel
from splitlm.wire.frame import Close, Hidden, Open, Spec

SAMPLE_BYTES = 256 * 2**20
"""Weights of the blocks that are timed: more than caches hold, so that memory is timed too, and not much more."""
MEMORY_SHARE = 0.8
"""Of the memory that is free now, how much a plan may use."""
SESSION = 1
LARGE_BYTES = 1 << 20


def free_memory_bytes() -> int:
    """What this machine could still give a process: free memory and caches, within its cgroup's limit.

    Raises:
        UsageError: the system does not tell.
    """
    kib = _number("/proc/meminfo", "MemAvailable:")
    if kib is None and "SC_AVPHYS_PAGES" not in os.sysconf_names:
        raise UsageError("This system does not tell how much memory is free", remedy="Say it with --memory")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if kib is None else kib * 1024
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.stat", "anon")
    return free if limit is None or used is None else max(0, min(free, limit - used))


def measure_device(
    files: ModelFiles,
    *,
    name: str,
    compute: str = "exact",
    model: str = "",
    memory_bytes: int = 0,
    context_tokens: int = 64,
    repeats: int = 15,
) -> tuple[ModelProfile, DeviceProfile]:
    """Times of decode steps at batch 1, on the calling thread. Run it on the compute thread.

    Four stages are timed in turns, so that a slow moment hits all alike: one block, several blocks, one block with the
    embedding, one with the head. Their medians' differences are what is asked for. In a model of one block, the block
    is everything and ``fixed_ms`` is 0.

    Args:
        name: of the device.
        compute: engine.
        model: name of the model, for people.
        memory_bytes: budget for weights and KV; 0 takes ``MEMORY_SHARE`` of what is free.
        context_tokens: KV length at which to measure.
        repeats: timed steps per stage.

    Raises:
        UsageError: fewer than one repetition, or no room in the model's context.
        CheckpointError: see ``ModelFiles.load``.
    """
    if repeats < 1:
        raise UsageError(f"{repeats} repetitions", where="--repeats", expected="at least 1")
    if not 0 < context_tokens <= files.context - repeats - 1:
        raise UsageError(
            f"A context of {context_tokens} tokens and {repeats} repetitions",
            where="--context",
            expected=f"together fewer than {files.context}, what the model can take",
        )
    budget = memory_bytes or int(free_memory_bytes() * MEMORY_SHARE)
    profile = model_profile(files, model, compute)
    many = min(files.blocks, max(2, SAMPLE_BYTES // max(1, profile.block_bytes)))
    last = files.blocks - 1
    segments = [
        Segment(last, files.blocks),
        Segment(files.blocks - many, files.blocks),
        Segment(0, 1, embed=True),
        Segment(last, files.blocks, head=True),
    ]
    one, several, embed, head = _times(build_stages(files, segments, compute=compute), context_tokens, repeats)
    block = (several - one) / (many - 1) if many > 1 else one
    # Noise must not make a block free: at the least it takes its share of the larger stage.
    block = max(block, several / many / 2)
    return profile, DeviceProfile(
        name=name,
        measured=identity(files, compute),
        memory_bytes=budget,
        block_ms=block,
        embed_ms=max(0.0, embed - one),
        head_ms=max(0.0, head - one),
        fixed_ms=max(0.0, one - block),
        threads=torch.get_num_threads(),
        context_tokens=context_tokens,
    )


def _times(stages: Sequence[Stage], context_tokens: int, repeats: int) -> list[float]:
    """Each stage's median milliseconds per decode step."""
    taken: list[list[float]] = [[] for _ in stages]
    for stage in stages:
        stage.open(SESSION)
        stage.forward(SESSION, _inputs(stage, context_tokens), 0)
    for i in range(repeats + 1):
        for stage, times in zip(stages, taken, strict=True):
            inputs = _inputs(stage, 1)
            begun = time.perf_counter()
            out = stage.forward(SESSION, inputs, context_tokens + i, logits=stage.segment.head)
            if stage.segment.head and out is not None:
                int(out.argmax())
            times.append((time.perf_counter() - begun) * 1e3)
    for stage in stages:
        stage.close(SESSION)
    return [median(times[1:]) for times in taken]  # the first step is a warm-up


def _inputs(stage: Stage, rows: int) -> torch.Tensor:
    if stage.segment.embed:
        return torch.zeros(1, rows, dtype=torch.int64)
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(1, rows, stage.hidden, generator=generator).to(stage.dtype)


async def measure_link(
    out: Channel, home: Channel, *, source: str, target: str, repeats: int = 25, deadline_s: float = 30.0
) -> LinkProfile:
    """Round trips of frames with hidden states to a peer that runs ``echo``, halved.

    Small and large frames alternate. Half of the small ones' median is the latency; what a large one takes longer is
    the rate. A link that is slower one way than the other shows as the mean of both.

    Args:
        out: data link to the peer.
        home: data link from it.
        source: this device.
        target: the peer.

    Raises:
        PeerLostError: the peer went away, or did not answer before the deadline.
        ProtocolError: it answered with another frame.
    """
    small: list[float] = []
    large: list[float] = []
    try:
        async with asyncio.timeout(deadline_s):
            await out.send(Open(session=SESSION, context=1, sampling=Sampling()))
            (await home.receive()).release()
            for i in range(repeats + 1):
                for size, times in ((0, small), (LARGE_BYTES, large)):
                    ms = await _round_trip(out, home, i, bytes(size))
                    if i:  # the first is a warm-up
                        times.append(ms)
            await out.send(Close(session=SESSION))
    except TimeoutError as error:
        raise PeerLostError(
            f"{target} did not echo within {deadline_s:g} s",
            where=out.peer,
            expected=f"{2 * (repeats + 1)} frames to come back",
        ) from error
    latency = median(small) / 2
    extra_ms = max(median(large) / 2 - latency, 1e-3)
    return LinkProfile(source=source, target=target, latency_ms=latency, bytes_per_s=LARGE_BYTES / extra_ms * 1e3)


async def _round_trip(out: Channel, home: Channel, position: int, data: bytes) -> float:
    header = Hidden(
        session=SESSION, epoch=0, position=position, sample=False, tensors=(Spec("uint8", (1, 1, len(data))),)
    )
    begun = time.perf_counter()
    await out.send(header, [data])
    frame = await home.receive()
    ms = (time.perf_counter() - begun) * 1e3
    same = frame.header == header
    frame.release()
    if not same:
        raise ProtocolError(
            f"A {type(frame.header).__name__} frame came back", where=home.peer, expected=f"the echo of {header}"
        )
    return ms


async def echo(inbound: Channel, outbound: Channel) -> None:
    """Send every frame back, until the session closes or the peer goes away."""
    while True:
        try:
            frame = await inbound.receive()
        except PeerLostError:
            return
        try:
            if isinstance(frame.header, Close):
                return
            await outbound.send(frame.header, frame.tensors)
        finally:
            frame.release()


def _number(path: str, key: str = "") -> int | None:
    """A whole number from a file of the kernel's: its only word, or the word after ``key``."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        words = os.read(fd, 8192).split()
    except OSError:
        return None
    finally:
        os.close(fd)
    if key and key.encode() not in words:
        return None
    word = words[words.index(key.encode()) + 1 if key else 0] if words else b""
    return int(word) if word.isdigit() else None
