"""Who a node is to its neighbours: what the handshake compares."""

from __future__ import annotations

import asyncio
import os
import socket

import splitlm
from splitlm.core.errors import PeerLostError
from splitlm.model.load import ModelFiles
from splitlm.model.payload import dtype_name
from splitlm.model.text import tokenizer_hash
from splitlm.model.tunable import TunableFiles
from splitlm.wire.frame import PROTOCOL
from splitlm.wire.handshake import Claims

PARENT_POLL_S = 0.5


def node_name(role: str) -> str:
    """A name that people recognise: role, host and process."""
    return f"{role} {socket.gethostname()}:{os.getpid()}"


def stranger(name: str) -> Claims:
    """The claims of a node that has no model yet (control plane)."""
    return Claims(node=name, version=splitlm.__version__, protocol=PROTOCOL)


def process_of(name: str) -> int:
    """The process id in a name of ``node_name``; 0 where there is none."""
    number = name.rpartition(":")[2]
    return int(number) if number.isascii() and number.isdigit() else 0


async def watch_parent(parent: int) -> None:
    """Where who started this process was killed before it could be joined, nothing would tell but the deadline.

    Raises:
        PeerLostError: it ended.
    """
    while os.getppid() == parent:
        await asyncio.sleep(PARENT_POLL_S)
    raise PeerLostError(f"The process {parent} ended, which had started this one")


def claims_for(name: str, files: ModelFiles, *, ring: str, place: int, epoch: int) -> Claims:
    """The claims of a node that has opened its model: hashes of config, weights and tokenizer (data plane).

    Reads the first bytes of every tensor: not for the event loop.
    """
    return Claims(
        node=name,
        version=splitlm.__version__,
        protocol=PROTOCOL,
        model=files.index.config_hash(),
        weights=files.index.fingerprint(),
        tokenizer=tokenizer_hash(files.folder),
        dtype=dtype_name(files.dtype),
        ring=ring,
        place=place,
        epoch=epoch,
    )


def aggregator_claims(run: str) -> Claims:
    """The claims of who averages in training: it needs no model to do so."""
    return Claims(node="the aggregator", version=splitlm.__version__, protocol=PROTOCOL, ring=run, role="aggregator")


def tuning_claims(name: str, files: TunableFiles, *, role: str, place: int, run: str) -> Claims:
    """The claims of a party in training. Tokenizers are the owners' affair, and weights made here have no hash."""
    return Claims(
        node=name,
        version=splitlm.__version__,
        protocol=PROTOCOL,
        model=files.index.config_hash(),
        weights=files.index.fingerprint() if files.index.entries else "",
        dtype=dtype_name(files.dtype),
        ring=run,
        place=place,
        role=role,
    )
