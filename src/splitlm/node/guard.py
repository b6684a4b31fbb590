"""Whether the links of a training are over TLS: what a machine's user says, and what the run says.

The coordinator decides for the run, from its own addresses. A party goes along unless its own user asked for the
opposite: nobody is talked out of TLS by a message that came over a plain line.
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from splitlm.core.config import RunConfig
from splitlm.core.errors import PeerRefusedError, UsageError
from splitlm.link.local import loopback
from splitlm.wire import tls

Mode = Literal["auto", "on", "off"]
_log = logging.getLogger("splitlm.train")


@dataclass(frozen=True)
class Guard:
    """What ``security`` says on this machine.

    Attributes:
        mode: ``auto`` is on as soon as one end of a link is not loopback.
        certs: this node's folder of ``splitlm certs``.
    """

    mode: Mode = "auto"
    certs: Path | None = None

    @classmethod
    def of(cls, config: RunConfig) -> Guard:
        """From the settings."""
        return cls(config.security.tls, Path(config.security.certs) if config.security.certs else None)

    def wanted(self, *hosts: str) -> bool:
        """Whether links between these hosts are to be over TLS; warns where they leave the machine without."""
        outward = [host for host in hosts if not loopback(host)]
        if self.mode == "off" and outward:
            _log.warning(
                "security.tls is off: whoever is on the way can read and change what is sent to and from %s", outward[0]
            )
        return self.mode == "on" or (self.mode == "auto" and bool(outward))

    def agreed(self, run: Mode, *hosts: str) -> bool:
        """Whether this party's links are to be over TLS.

        Args:
            run: what the coordinator decided for all; ``auto`` where it did not.
            hosts: this party's own end, and those that it knows of others.

        Raises:
            PeerRefusedError: the run has it the other way than this machine's user.
        """
        mine = self.wanted(*hosts)
        if run == "auto" or (run == "on") == mine:
            return mine
        if run == "on" and self.mode == "auto":
            return True  # others are further away than this one can see
        away = next((host for host in hosts if not loopback(host)), "")
        here = f"auto here, and {away} is another machine" if self.mode == "auto" else f"{self.mode} here"
        raise PeerRefusedError(
            f"The run's links are {'over TLS' if run == 'on' else 'plain'}, and security.tls is {here}",
            expected="the same on all machines",
            remedy="Set security.tls: on everywhere, with each node's own folder of splitlm certs as security.certs",
        )

    def load(self, wanted: bool) -> tls.Security | None:
        """The contexts of links that are to be over TLS; None for plain ones.

        Raises:
            UsageError: there are no certificates, or they are no good.
        """
        if not wanted:
            return None
        if self.certs is None:
            raise UsageError(
                "Links that leave this machine are over TLS, and there is no certificate",
                where="security.certs",
                expected="this node's own folder of certificates",
                remedy="Make one for each node with splitlm certs DIR; security.tls: off goes without, in clear",
            )
        return tls.load(self.certs)

    def broker(self, wanted: bool) -> ssl.SSLContext | None:
        """How the broker is reached: with this node's certificate, or, without a folder, by the system's authorities.

        Raises:
            UsageError: the certificates are no good.
        """
        if not wanted:
            return None
        if self.certs is None:
            return ssl.create_default_context()
        return tls.load(self.certs, check_host=True).dialling
