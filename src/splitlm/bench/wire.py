"""The figures of frames and links: what a hop costs beyond the bytes, in times of a bare echo of the same size."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from statistics import median

from splitlm.bench.arm import Arm
from splitlm.bench.figure import Figure, Goal, figure, ratios
from splitlm.bench.turns import interleave

DECODE, CHUNK, LARGE = 2304, 128 * 2304, 2**20
"""Bytes of one row of SmolLM2-135M in fp32, of a prefill chunk of 128 rows, and a mebibyte."""
SIZES = {"decode": DECODE, "chunk": CHUNK, "1mib": LARGE}
IDLE_MS = 20.0
"""About what a stage waits while the others compute."""


def wire(repetitions: int, count: int, say: Callable[[str], None]) -> list[Figure]:
    """All of them.

    Args:
        repetitions: turns that count.
        count: messages per turn.
        say: takes one line of progress.
    """
    with ExitStack() as stack:
        arms = [stack.enter_context(Arm(kind)) for kind in ("echo", "link", "frame")]
        echo, link, frame = (arm.ready() for arm in arms)
        sides: dict[str, Callable[[], float]] = {}
        for name, size in SIZES.items():
            for side, arm in (("echo", echo), ("link", link)):
                sides[f"{side} {name}"] = _trip(arm, size, count if size == DECODE else max(1, count // 5))
        for side, arm in (("echo", echo), ("link", link)):
            sides[f"{side} idle"] = _trip(arm, DECODE, max(1, count // 5), IDLE_MS)
            sides[f"{side} stream"] = _stream(arm, max(2, count // 5))
        sides["handshake"] = lambda: float(link.run(handshake=True, count=max(1, count // 15))["ms"])
        costs: dict[str, list[dict[str, float]]] = {"decode": [], "1mib": []}
        for name, seen in costs.items():
            sides[f"frame {name}"] = _frame(frame, SIZES[name], count, seen)
        samples = interleave(sides, repetitions, say)
    return _figures(samples, costs)


def _trip(arm: Arm, size: int, count: int, idle_ms: float = 0.0) -> Callable[[], float]:
    return lambda: float(arm.run(size=size, count=count, idle_ms=idle_ms)["ms"])


def _stream(arm: Arm, count: int) -> Callable[[], float]:
    return lambda: float(arm.run(size=LARGE, count=count, stream=True)["ms"])


def _frame(arm: Arm, size: int, count: int, seen: list[dict[str, float]]) -> Callable[[], float]:
    def measure() -> float:
        seen.append(arm.run(size=size, count=count))
        return seen[-1]["encode"] + seen[-1]["decode"]

    return measure


def _figures(samples: dict[str, list[float]], costs: dict[str, list[dict[str, float]]]) -> list[Figure]:
    texts = {"decode": "a decode frame (2.3 KiB)", "chunk": "a prefill chunk (288 KiB)", "1mib": "a frame of 1 MiB"}
    found = [
        figure(
            "link-hop",
            f"one way of {texts['decode']} with both thread hand-overs, back to back",
            samples["link decode"],
            unit="ms",
            goal=Goal("<=", 0.3, 0.2),
        )
    ]
    for name, text in texts.items():
        values, unit = ratios(samples, f"link {name}", f"echo {name}"), median(samples[f"echo {name}"])
        note = f"link {median(samples[f'link {name}']):.3f} ms, bare echo {unit:.4f} ms"
        found.append(figure(f"link-{name}", f"one way of {text}, link ÷ bare echo", values, note=note))
    idle, bare = median(samples["link idle"]), median(samples["echo idle"])
    found += [
        figure(
            "link-idle",
            f"the same for a decode frame after {IDLE_MS:g} ms of sleep on both sides",
            ratios(samples, "link idle", "echo idle"),
            note=f"link {idle:.3f} ms, bare echo {bare:.4f} ms: what waking a core costs is in both",
        ),
        figure(
            "throughput",
            "frames of 1 MiB one after the other, link ÷ bare socket, bytes/s (the bare side has no checksum)",
            ratios(samples, "echo stream", "link stream"),
        ),
        figure(
            "handshake",
            "connect, challenge, answer, welcome ÷ bare echo of 2.3 KiB",
            ratios(samples, "handshake", "echo decode"),
            note=f"{median(samples['handshake']):.2f} ms",
        ),
    ]
    for name, seen in costs.items():
        # The first turn of every arm is a warm-up that does not count.
        counted = seen[1:]
        found.append(
            figure(
                f"frame-{name}",
                f"encode and decode {texts[name]}, no socket ÷ bare echo of its size",
                ratios(samples, f"frame {name}", f"echo {name}"),
                note=f"encode {median(c['encode'] for c in counted):.4f} ms, "
                f"decode {median(c['decode'] for c in counted):.4f} ms",
            )
        )
    shares = [100 * 2 * c["crc"] / (c["encode"] + c["decode"]) for c in costs["1mib"][1:]]
    found.append(figure("crc", "the checksum's share of encoding and decoding 1 MiB", shares, unit="%"))
    return found
