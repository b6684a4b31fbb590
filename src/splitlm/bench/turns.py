"""Taking turns: every arm of a comparison is measured once per repetition, in an order that alternates."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def interleave(
    arms: Mapping[str, Callable[[], float]], repetitions: int, say: Callable[[str], None] = lambda _: None
) -> dict[str, list[float]]:
    """Measure every arm ``repetitions`` times: A B C, C B A, A B C … after one turn each that does not count.

    Alternating the order keeps a drift of the machine from favouring whoever goes first.

    Args:
        say: takes one line of progress per repetition.
    """
    for measure in arms.values():
        measure()
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(repetitions):
        names = list(arms) if turn % 2 == 0 else list(list(arms)[::-1])
        for name in names:
            samples[name].append(arms[name]())
        say(f"{turn + 1}/{repetitions}: " + ", ".join(f"{name} {samples[name][-1]:.4g}" for name in arms))
    return samples
