"""What cannot be right in a configuration although every key has its type: ranges, choices, and keys that disagree."""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import inspect

from splitlm.core.config_sections import MODEL_NAMES, SHAPE_NAMES, Section, Settings
from splitlm.core.config_tree import Kind, bare, fields_of, mistaken_model, model_key, nearest
from splitlm.core.errors import CutError, UsageError
from splitlm.core.shape import Shape, cut_for, find_shape

_CUT = ("server.cut-layers", "server.tail-blocks")


def check(settings: Settings, where: str) -> None:
    """Raise for the first thing that is wrong; ``where`` is the file.

    Raises:
        UsageError: a value out of its range, a word that nothing knows, or keys that disagree.
        CutError: a cut that no model can have.
    """
    for path, value, kind in leaves(settings):
        _check_leaf(path, value, kind, f"{where}:{path}")
    for name in settings.server.model:
        _check_text("A name in server.model", name, f"{where}:server.model")
    _check_paths(settings, where)
    _check_names(settings, where)
    shape = find_shape(settings.server.architecture, f"{where}:server.architecture")
    _check_members(settings, shape, where)
    _check_cut(settings, shape, where)
    if shape.agreed:
        _check_credit(settings, where)


def leaves(section: Section, above: str = "") -> Iterator[tuple[str, object, Kind]]:
    """Path, value and type of every key below a section, in order."""
    for field in fields_of(type(section)):
        path, value = f"{above}{field.encode_name}", getattr(section, field.name)
        kind, _, _ = bare(field.type)
        if isinstance(kind, inspect.StructType):
            yield from leaves(value, f"{path}.")
        elif isinstance(kind, inspect.DictType):
            for name, inner in value.items():
                yield from leaves(inner, f"{path}.{name}.")
        else:
            yield path, value, field.type


def credit(settings: Settings) -> int:
    """How many of an owner's microbatches may be live at one worker."""
    u_shape = settings.learning.u_shape
    return min(u_shape.max_inflight, u_shape.worker_max_inflight // settings.server.owners)


def active_blocks(settings: Settings) -> int | None:
    """``n_block`` of the model that ``server.model-name`` names, or None for all of its blocks."""
    wanted = model_key(settings.server.model_name)
    return next((limit.n_block for name, limit in settings.server.model.items() if model_key(name) == wanted), None)


def _check_leaf(path: str, value: object, kind: Kind, where: str) -> None:
    kind, _, words = bare(kind)
    if value is None:
        return
    if isinstance(value, str):
        _check_text(path, value, where)
    if words and value not in words:
        raise UsageError(
            f"{path} cannot be {str(value)[:60]!r}",
            where=where,
            expected="one of " + ", ".join(words),
            remedy=f"The nearest is {nearest(str(value), words)}",
        )
    items = kind.item_types if isinstance(kind, inspect.TupleType) else (kind,)
    values = value if isinstance(value, tuple) else (value,)
    for one, item in zip(values, items, strict=True):
        if not isinstance(item, inspect.IntType | inspect.FloatType) or not isinstance(one, int | float):
            continue
        least = item.ge if item.ge is not None else -math.inf
        above = item.gt if item.gt is not None else -math.inf
        most = item.le if item.le is not None else math.inf
        if not (least <= one <= most and one > above and one < math.inf):
            error = CutError if path in _CUT else UsageError
            raise error(
                f"{path} is {list(value) if isinstance(value, tuple) else value}", where=where, expected=_range(item)
            )


def _check_text(what: str, text: str, where: str) -> None:
    """Refuse what no path and no message can hold: a null byte, or half of a pair of UTF-16."""
    if wrong := next((c for c in text if c == "\0" or "\ud800" <= c <= "\udfff"), ""):
        raise UsageError(f"{what} holds the character {wrong!r}", where=where, expected="text without it")


def _check_paths(settings: Settings, where: str) -> None:
    """Refuse a path that is empty: it would mean the file's own folder."""
    paths = {
        "server.model-path": settings.server.model_path,
        "server.data-name": settings.server.data_name,
        "server.data-path": settings.server.data_path,
        "security.certs": settings.security.certs,
        "log_path": settings.log_path,
    }
    for path, value in paths.items():
        if value is not None and not value.strip():
            raise UsageError(
                f"{path} is empty",
                where=f"{where}:{path}",
                expected="a path" if path != "server.data-name" else "the name of a data set, or a file",
                remedy="Leave it out, or write . for the folder of this file",
            )


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    number = "a whole number" if isinstance(kind, inspect.IntType) else "a finite number"
    parts = [
        f"{word} {bound}"
        for word, bound in (("above", kind.gt), ("of at least", kind.ge), ("at most", kind.le))
        if bound is not None
    ]
    return " ".join([number, " and ".join(parts)]).strip()


def _check_names(settings: Settings, where: str) -> None:
    server = settings.server
    meant = mistaken_model(server.model_name)
    if meant or not server.model_name.strip():
        raise UsageError(
            f"server.model-name cannot be {server.model_name!r}",
            where=f"{where}:server.model-name",
            expected=f"{', '.join(MODEL_NAMES)}, a directory or a hub id",
            remedy=f"The nearest is {meant}; a directory of that name is written ./{server.model_name}"
            if meant
            else "",
        )
    node = server.aggregator
    if node is not None and (not node.strip() or node.partition("-")[0] == "owner"):
        raise UsageError(
            f"Averages cannot be taken at {node[:60]!r}: no owner may see what another one learned",
            where=f"{where}:server.aggregator",
            expected="worker-0 or another worker by its number, the host of a worker, or coordinator",
        )
    if any(mark in settings.rabbit.address for mark in "@/") or not settings.rabbit.address.strip():
        raise UsageError(
            "rabbit.address is not the name or address of a host",
            where=f"{where}:rabbit.address",
            expected="a host alone",
            remedy="Port, username, password, virtual-host and tls have keys of their own",
        )


def _check_members(settings: Settings, shape: Shape, where: str) -> None:
    workers = settings.server.workers
    if shape.max_workers and workers > shape.max_workers:
        other = next((name for name in SHAPE_NAMES if find_shape(name).max_workers == 0), "")
        raise UsageError(
            f"{shape.name} has one last stage, and server.clients asks for {workers}",
            where=f"{where}:server.clients",
            expected=f"[n, {shape.max_workers}]",
            remedy=f"Several workers need server.architecture: {other}",
        )


def _check_cut(settings: Settings, shape: Shape, where: str) -> None:
    blocks = active_blocks(settings)
    if blocks is None:
        return
    server = settings.server
    try:
        cut_for(shape, blocks, server.cut_layers, server.tail_blocks)
    except CutError as error:
        raise CutError(
            error.what, where=f"{where}:server.cut-layers", expected=error.expected, remedy=error.remedy
        ) from error


def _check_credit(settings: Settings, where: str) -> None:
    u_shape, server = settings.learning.u_shape, settings.server
    section = f"{where}:learning.u-shape"
    if u_shape.worker_max_inflight < server.owners:
        raise UsageError(
            f"worker-max-inflight {u_shape.worker_max_inflight} leaves no room for each of {server.owners} owners",
            where=f"{section}.worker-max-inflight",
            expected=f"at least the number of owners, {server.owners}",
        )
    each = credit(settings)
    needed = max(each * server.owners, min(u_shape.max_inflight, each * server.workers))
    if u_shape.transport_queue_size < needed:
        raise UsageError(
            f"transport-queue-size {u_shape.transport_queue_size} could starve the credits: with clients "
            f"{list(server.clients)}, each owner may have {each} microbatches at each worker",
            where=f"{section}.transport-queue-size",
            expected=f"at least {needed}",
            remedy="Lengthen the queue, or lower max-inflight or worker-max-inflight",
        )
