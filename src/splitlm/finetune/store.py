"""The folder of a training run: its settings, its metrics, and the last complete rounds.

::

    RUN/
      config.yaml  versions.json  metrics.jsonl  metrics.csv
      lock                              held while a process writes here
      rounds/000003/
        party-<name>.safetensors        weights, tensors of the optimizer, state of the random generators
        party-<name>.json               everything else of that party
        manifest.json                   model, cut, and size and SHA-256 of every file

A round exists once its manifest has been renamed into place, which is the last thing that happens to it. A file is
written under a temporary name, brought to the disk and renamed. No pickle: what is not a tensor is JSON.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

import msgspec
import yaml

from splitlm.core.cut import Segment
from splitlm.core.errors import CheckpointError, UsageError
from splitlm.finetune.diskfile import append, append_row, sha256, write
from splitlm.finetune.partyfile import Party as Party
from splitlm.finetune.partyfile import files_of, load_party, save_party
from splitlm.model.checkpoint import flush, unwritable

KEEP = 2
"""Rounds that are kept."""
_MANIFEST = "manifest.json"
_log = logging.getLogger(__name__)


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint belongs to.

    Attributes:
        model: hash of the model's config (``model.config.config_hash``).
        cut: the segments, in the order of the walk.
    """

    model: str
    cut: tuple[Segment, ...]

    def __str__(self) -> str:
        return f"model {self.model[:12]} cut as {' | '.join(map(str, self.cut))}"


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bytes: int
    sha256: str


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    round: int
    identity: Identity
    parties: tuple[str, ...]
    files: dict[str, _File]
    schema: Literal["splitlm-round/1"] = "splitlm-round/1"


class RunFolder:
    """One run's folder. ``create`` or ``reopen`` it to write; ``latest`` and ``load`` need neither.

    Args:
        path: of the folder.
        identity: of the model and cut at hand; rounds of another one are refused.
    """

    def __init__(self, path: Path, identity: Identity) -> None:
        self.path, self.identity = path, identity
        self._lock: IO[bytes] | None = None

    def create(self, config: Mapping[str, object], versions: Mapping[str, str]) -> None:
        """Make the folder, take it, and write down how the run was set up.

        Args:
            config: resolved, as YAML can hold it: every key, defaults too.
            versions: of the libraries (``telemetry.folder.versions``).

        Raises:
            UsageError: another process writes here, or another run lies here.
            SplitlmError: it cannot be written.
        """
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            self._take()
            try:
                if any((self.path / name).exists() for name in ("config.yaml", "rounds")):
                    raise UsageError(
                        "Another run lies here",
                        where=str(self.path),
                        expected="a new folder",
                        remedy="Choose another one, or go on with that run by --resume",
                    )
                plain = msgspec.to_builtins(config, enc_hook=str)
                write(self.path / "versions.json", _json(dict(versions)))
                write(self.path / "config.yaml", yaml.safe_dump(plain, sort_keys=False, allow_unicode=True).encode())
            except BaseException:
                self.close()
                raise

    def reopen(self) -> dict[str, Any]:
        """Take the folder of an earlier run to go on with it; its settings.

        Raises:
            UsageError: another process writes here, or there is no run.
            SplitlmError: it cannot be written.
        """
        file = self.path / "config.yaml"
        try:
            settings = yaml.safe_load(file.read_bytes())
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            raise UsageError(f"There is no run here ({error})", where=str(file), expected="a run's folder") from error
        if not isinstance(settings, dict):
            raise UsageError("There are no settings in it", where=str(file), expected="the settings of a run")
        with self._writing():
            self._take()
        return settings

    def close(self) -> None:
        """Let another process write here."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def save_round(self, round: int, parties: Mapping[str, Party]) -> None:
        """Store a round, then remove all but the last two. A round that was stored before is replaced.

        Raises:
            SplitlmError: it cannot be written; earlier rounds are as they were, and nothing of this one is left.
            TypeError: an optimizer's state holds something that is neither plain nor a tensor.
            RuntimeError: the folder is not open.
        """
        folder = self._round(round)
        self._check_open()
        with self._writing():
            (folder / _MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                folder.mkdir(parents=True)
                files: dict[str, _File] = {}
                for name in sorted(parties):
                    for path in save_party(folder, name, parties[name]):
                        files[path.name] = _File(path.stat().st_size, sha256(path))
                manifest = _Manifest(round=round, identity=self.identity, parties=tuple(sorted(parties)), files=files)
                flush(folder.parent)
                write(folder / _MANIFEST, _json(msgspec.to_builtins(manifest)))
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        for old in self._complete()[KEEP:]:
            with contextlib.suppress(OSError):  # what stays behind is removed after a later round
                (self._round(old) / _MANIFEST).unlink()
                shutil.rmtree(self._round(old))

    def latest(self) -> int | None:
        """The newest round whose files are all as they were written; None where there is none.

        A damaged one is passed over, with a warning that says what is wrong.

        Raises:
            CheckpointError: a round is of another model or cut.
        """
        for number in self._complete():
            try:
                manifest = self._manifest(number)
                if manifest.identity == self.identity:
                    for name in sorted(manifest.files):
                        self._verify(number, manifest, name)
            except CheckpointError as error:
                _log.warning("Round %d is passed over: %s", number, error)
                continue
            self._check_identity(number, manifest)
            return number
        return None

    def load(self, round: int, party: str) -> Party:
        """What a party stored in a round, in memory of its own, on the CPU.

        Raises:
            CheckpointError: the round is of another model or cut, is damaged, or is not there.
            UsageError: the party had no part in it.
        """
        manifest = self._manifest(round)
        self._check_identity(round, manifest)
        if party not in manifest.parties:
            raise UsageError(
                f"There is no party {party!r}",
                where=str(self._round(round)),
                expected=f"one of {', '.join(manifest.parties)}",
            )
        for name in files_of(party):
            self._verify(round, manifest, name)
        return load_party(self._round(round), party)

    def metrics(self, record: Mapping[str, object]) -> None:
        """Append one line to ``metrics.jsonl`` and ``metrics.csv``: of a window or a round.

        Columns are added to the CSV when a record brings new ones. Numbers that are not finite become null.

        Raises:
            SplitlmError: it cannot be written; no half line is left.
            RuntimeError: the folder is not open.
        """
        self._check_open()
        with self._writing():
            plain = msgspec.json.decode(msgspec.json.encode(dict(record), enc_hook=str))
            append(self.path / "metrics.jsonl", msgspec.json.encode(plain) + b"\n")
            append_row(self.path / "metrics.csv", plain)

    def _round(self, round: int) -> Path:
        return self.path / "rounds" / f"{round:06}"

    def _complete(self) -> list[int]:
        """Rounds that have a manifest, newest first."""
        found = (path.parent.name for path in self.path.glob(f"rounds/*/{_MANIFEST}"))
        return sorted((int(name) for name in found if name.isdecimal()), reverse=True)

    def _manifest(self, round: int) -> _Manifest:
        path = self._round(round) / _MANIFEST
        try:
            return msgspec.json.decode(path.read_bytes(), type=_Manifest)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _damaged(path, f"The manifest cannot be read ({error})") from error

    def _verify(self, round: int, manifest: _Manifest, name: str) -> None:
        """Make sure that a file of a round is as it was written."""
        path, told = self._round(round) / name, manifest.files.get(name)
        if told is None or Path(name).name != name:
            raise _damaged(path, "The manifest has no such file")
        try:
            size = path.stat().st_size
            if size != told.bytes:
                raise _damaged(path, f"It has {size} bytes and not {told.bytes}")
            if sha256(path) != told.sha256:
                raise _damaged(path, "Its SHA-256 is another one")
        except OSError as error:
            raise _damaged(path, f"It cannot be read ({error.strerror})") from error

    def _check_identity(self, round: int, manifest: _Manifest) -> None:
        if manifest.identity != self.identity:
            raise CheckpointError(
                f"The round is of {manifest.identity}",
                where=str(self._round(round)),
                expected=str(self.identity),
                remedy="Go on with the model and the cut that the run began with, or begin another run",
            )

    def _check_open(self) -> None:
        if self._lock is None:
            raise RuntimeError("the folder is not open for writing")

    def _take(self) -> None:
        if self._lock is not None:
            raise RuntimeError("the folder is open already")
        lock = (self.path / "lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise UsageError(
                "Another process writes here",
                where=str(self.path),
                expected="a folder that is not in use",
                remedy="Wait for that run or stop it, or choose another folder",
            ) from error
        self._lock = lock

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unwritable(self.path, error) from error


def _json(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        what,
        where=str(path),
        expected="what the round's manifest was written with",
        remedy="Go on from an earlier round, or copy the file again",
    )
