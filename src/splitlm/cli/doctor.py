"""``splitlm doctor``: what would fail here, before it does."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from splitlm.cli import checkup
from splitlm.cli import options as o
from splitlm.cli.certs import TlsFolder, tls_folder
from splitlm.cli.checkup import Finding
from splitlm.cli.console import console
from splitlm.core.errors import CheckFailedError


@dataclass(frozen=True)
class PeerOptions:
    """The addresses that a run would use."""

    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Whether this address could be listened on.")] = ""
    join: Annotated[str, typer.Option(metavar="HOST:PORT", help="Whether a head there would let us in.")] = ""
    deadline: Annotated[float, typer.Option(help="Seconds to wait for that head.")] = 3.0
    token_file: o.TokenFile = None
    tls: TlsFolder = ""


def doctor(
    context: typer.Context,
    cut: o.CutOptions,
    peers: PeerOptions,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Also look at this model, and at its cut.")] = "",
    as_json: o.AsJson = False,
) -> None:
    """Check this machine, and with MODEL or addresses whether a run with them could work. Exit code 1 if not."""
    voice = console(context)
    token, deadline = o.read_token(peers.token_file), o.seconds(peers.deadline, "--deadline")
    listen = o.address(peers.listen, "--listen") if peers.listen else None
    join = o.address(peers.join, "--join") if peers.join else None
    settings = cut.settings()
    voice.say("trying the compute engines")
    found = [*checkup.versions(), *checkup.engines(), *checkup.machine(), *checkup.disk(), checkup.packaged_model()]
    if model:
        voice.say("looking at the model")
        found += checkup.model(model, settings, joins=join is not None)
    if listen:
        found.append(checkup.listening(*listen))
    folder = tls_folder(peers.tls, *filter(None, (listen, join)))
    if folder is not None:
        found.append(checkup.certificates(folder))
    if join and (folder is None or found[-1].verdict == "ok"):
        voice.say(f"looking for the head at {peers.join}")
        found.append(checkup.joining(*join, token, deadline, folder))
    if as_json:
        voice.json([asdict(finding) for finding in found])
    else:
        for finding in found:
            voice.out(_line(finding))
    failures = [finding for finding in found if finding.verdict == "fail"]
    if failures:
        raise CheckFailedError(
            f"{len(failures)} of {len(found)} checks failed: {', '.join(finding.name for finding in failures)}"
        )


def _line(finding: Finding) -> str:
    advice = f" {finding.advice}." if finding.advice else ""
    return f"{finding.verdict:<4}  {finding.name}: {finding.text}.{advice}"
