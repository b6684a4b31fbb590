"""A private RabbitMQ broker on loopback, which a test may stop, kill and start again with what it had stored."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from splitlm.bus.address import Address
from splitlm.wire.tls import load
from tests.link.certificates import folders

SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
"""The script itself: the one on the PATH changes the user, which needs root and hides the signals."""
START_S = 90.0
STOP_S = 30.0
ASK = "exec 3<>/dev/tcp/127.0.0.1/{port}; printf 'AMQP\\0\\0\\11\\1' >&3; head -c1 <&3"
HERE = "127.0.0.1"
GREETING = b"AMQP\x00\x00\x09\x01"


class Broker:
    """One broker. ``port`` is plain; ``tls_port`` wants a certificate of the folder's authority, and is 0 without one.

    Args:
        certificates: a folder as ``splitlm certs`` makes it for a node.
        host: an address of its machine that it listens at, beside loopback; guests may then come from elsewhere.
        within: the beginning of a command that runs another on its machine, such as ``ip netns exec NAME``.
    """

    def __init__(self, certificates: Path | None = None, host: str = "", within: Sequence[str] = ()) -> None:
        self._within = tuple(within)
        self.base = Path(tempfile.mkdtemp(prefix="rabbit-"))
        self.port, distribution, self._epmd = free_port(), free_port(), free_port()
        self.tls_port = free_port() if certificates else 0
        lines = [
            f"listeners.tcp.1 = 127.0.0.1:{self.port}",
            "log.console = true",
            "log.file = false",
            "disk_free_limit.absolute = 50MB",
            "vm_memory_high_watermark.absolute = 1GB",
        ]
        if host:
            lines += [f"listeners.tcp.2 = {host}:{self.port}", "loopback_users.guest = false"]
        if certificates:
            lines += [
                f"listeners.ssl.1 = {host or '127.0.0.1'}:{self.tls_port}",
                f"ssl_options.cacertfile = {certificates}/ca.pem",
                f"ssl_options.certfile = {certificates}/cert.pem",
                f"ssl_options.keyfile = {certificates}/key.pem",
                "ssl_options.verify = verify_peer",
                "ssl_options.fail_if_no_peer_cert = true",
                "ssl_options.versions.1 = tlsv1.3",
            ]
        (self.base / "rabbitmq.conf").write_text("\n".join(lines) + "\n")
        (self.base / "plugins").write_text("[].\n")
        for name in ("mnesia", "log"):
            (self.base / name).mkdir()
        self._environment = {
            **os.environ,
            "HOME": str(self.base),  # where the Erlang cookie goes
            "RABBITMQ_NODENAME": f"t{uuid.uuid4().hex[:8]}@localhost",
            "RABBITMQ_CONFIG_FILE": str(self.base / "rabbitmq"),
            "RABBITMQ_MNESIA_BASE": str(self.base / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.base / "log"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.base / "plugins"),
            "RABBITMQ_PID_FILE": str(self.base / "pid"),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_DIST_PORT": str(distribution),
            "ERL_EPMD_PORT": str(self._epmd),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                "-kernel inet_dist_use_interface {127,0,0,1} +S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none"
            ),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it unless it runs, again with the same ports and its old store, and wait until it answers."""
        if self._process is not None:
            return
        with (self.base / "console.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._within, SERVER],
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.base / "console.log").read_text()[-4000:])
            time.sleep(0.05)

    def stop(self, *, kill: bool = False) -> None:
        """Stop it in order, or at once; what it stored stays."""
        process, self._process = self._process, None
        if process is None:
            return
        if not kill:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        while self._answers():  # the last of its processes still goes
            time.sleep(0.05)

    def remove(self) -> None:
        """Stop it, and leave nothing behind."""
        self.stop()
        subprocess.run([*self._within, "epmd", "-port", str(self._epmd), "-kill"], capture_output=True, check=False)
        shutil.rmtree(self.base, ignore_errors=True)

    def queues(self) -> set[str]:
        """Names of all queues."""
        return set(self._control("list_queues", "name", "--silent").split())

    def _control(self, *words: str) -> str:
        done = subprocess.run(
            [*self._within, "/usr/lib/rabbitmq/bin/rabbitmqctl", *words],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout

    def _answers(self) -> bool:
        """A listener is up only when it answers AMQP's greeting with Connection.Start."""
        if self._within:
            ask = [*self._within, "timeout", "2", "bash", "-c", ASK.format(port=self.port)]
            return subprocess.run(ask, capture_output=True, check=False).stdout == b"\x01"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 0.5) as sock:
            sock.settimeout(2)
            sock.sendall(GREETING)
            return sock.recv(1) == b"\x01"
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def access(broker: Broker, *, tls: bool = False, password: str = "guest", virtual_host: str = "/") -> Address:
    """The broker's address, at its plain port or at the one with TLS."""
    context = load(folders() / "good" / "a", check_host=True).dialling if tls else None
    port = broker.tls_port if tls else broker.port
    return Address(HERE, port, password=password, virtual_host=virtual_host, tls=context)
