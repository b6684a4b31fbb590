"""Which rows each owner has: spread evenly, or by a Dirichlet draw over the classes. Pure, and without torch."""

from __future__ import annotations

import hashlib
import logging
import math
import random
from collections.abc import Sequence

from splitlm.core.errors import UsageError

_log = logging.getLogger(__name__)


def distribute(
    labels: Sequence[int],
    owners: int,
    *,
    non_iid: bool,
    num_sample: int | None,
    num_label: int | None,
    alpha: float,
    seed: int,
) -> list[list[int]]:
    """Row numbers of each owner; no row is given twice, and the same arguments give the same lists everywhere.

    With ``refresh-each-round`` a caller gives ``seed + round``. Where there are fewer rows than were asked for, each
    owner has its equal part of them. A class that runs out is made up for from the owner's other classes. An owner may
    end without a class, or without any row: the log says so, and both are legal.

    Args:
        labels: the class of each row.
        owners: how many there are, 1 at least.
        non_iid: each owner's shares of the classes are drawn from a symmetric Dirichlet distribution; otherwise
            every owner is given rows as they come, whatever their class.
        num_sample: rows per owner; None for all there are.
        num_label: classes that are spread, the lowest ones; None for all there are.
        alpha: the distribution's parameter: the smaller, the fewer classes an owner has.
        seed: of the draw.

    Raises:
        UsageError: a number is out of its range.
    """
    _check(owners, num_sample, num_label, alpha)
    classes = sorted(set(labels))
    if num_label is not None and num_label > len(classes):
        _log.warning("num-label %d: the data has %d classes, which are all used", num_label, len(classes))
    classes = classes[:num_label]
    draw = _Draw(seed)
    left = {c: draw.shuffled([row for row, label in enumerate(labels) if label == c]) for c in classes}
    sizes = _sizes(sum(map(len, left.values())), owners, num_sample)
    if non_iid and classes:
        shares = [_take(left, size, draw.dirichlet(alpha, len(classes))) for size in sizes]
    else:
        rows = draw.shuffled(sorted(row for found in left.values() for row in found))
        shares = [[rows.pop() for _ in range(size)] for size in sizes]
    for owner, share in enumerate(shares):
        missing = set(classes) - {labels[row] for row in share}
        if not share:
            _log.warning("owner %d has no rows", owner)
        elif missing:
            _log.info(
                "owner %d has %d rows and none of class %s", owner, len(share), ", ".join(map(str, sorted(missing)))
            )
    return [draw.shuffled(share) for share in shares]


def _check(owners: int, num_sample: int | None, num_label: int | None, alpha: float) -> None:
    for key, value, least in (("clients", owners, 1), ("num-sample", num_sample, 0), ("num-label", num_label, 1)):
        if value is not None and value < least:
            raise UsageError(f"{key} is {value}", where=f"data-distribution.{key}", expected=f"{least} or more")
    if not (math.isfinite(alpha) and alpha > 0):
        raise UsageError(f"alpha is {alpha}", where="data-distribution.dirichlet.alpha", expected="a number above 0")


def _sizes(rows: int, owners: int, num_sample: int | None) -> list[int]:
    wanted = rows if num_sample is None else owners * num_sample
    if wanted > rows:
        _log.warning("num-sample %s: %d owners share the %d rows that there are", num_sample, owners, rows)
    each, over = divmod(min(wanted, rows), owners)
    return [each + (owner < over) for owner in range(owners)]


def _take(left: dict[int, list[int]], size: int, shares: Sequence[float]) -> list[int]:
    """``size`` rows out of ``left``, by these shares of its classes as long as they last."""
    wanted = dict(zip(left, shares, strict=True))
    taken: list[int] = []
    while len(taken) < size:
        open_ = [c for c in left if left[c]]
        # A share may be a true zero; classes left over are then used alike.
        total = sum(wanted[c] for c in open_)
        part = {c: (wanted[c] / total if total > 0 else 1 / len(open_)) for c in open_}
        need = size - len(taken)
        count = {c: int(part[c] * need) for c in open_}
        rest = sorted(open_, key=lambda c: (count[c] - part[c] * need, c))
        for c in rest[: need - sum(count.values())]:  # the largest remainders
            count[c] += 1
        for c in open_:
            taken += [left[c].pop() for _ in range(min(count[c], len(left[c])))]
    return taken


class _Draw:
    """Random numbers that depend on the seed alone, on any machine."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(hashlib.sha256(f"distribute {seed}".encode()).digest())

    def shuffled(self, rows: Sequence[int]) -> list[int]:
        return self._random.sample(rows, len(rows))

    def dirichlet(self, alpha: float, classes: int) -> list[float]:
        gammas = [self._random.gammavariate(alpha, 1.0) for _ in range(classes)]
        total = sum(gammas)
        if total > 0:
            return [g / total for g in gammas]
        only = self._random.randrange(classes)  # so small an alpha that all underflow: one class is all there is
        return [float(c == only) for c in range(classes)]
