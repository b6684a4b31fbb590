"""The folder of a training run: its settings, its metrics, and the last complete rounds.

::

    RUN/
      config.yaml  versions.json  metrics.jsonl  metrics.csv
      lock                              held while a process writes here
      rounds/000003/
        party-<name>.safetensors        weights, tensors of the optimizer, state of the random generators
        party-<name>.json               everything else of that party
        manifest.json                   model, cut, and size and SHA-256 of every file

Parties write their files themselves, each into its own folder (``partyfile.PartyFolder``), which may be this one. A
round exists once its manifest has been renamed into place, which is the last thing that happens to it. A file is
written under a temporary name, brought to the disk and renamed. No pickle: what is not a tensor is JSON.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import msgspec
import yaml

from splitlm.core.errors import CheckpointError, UsageError
from splitlm.finetune.diskfile import append, append_row, write
from splitlm.finetune.manifest import MANIFEST, File, Manifest, measure, read_manifest, round_folder, verify
from splitlm.finetune.manifest import Identity as Identity
from splitlm.finetune.partyfile import Party as Party
from splitlm.finetune.partyfile import files_of, load_party, save_party
from splitlm.model.checkpoint import flush, unwritable

KEEP = 2
"""Rounds that are kept."""
NAMED = 8
"""Damaged files that an error names."""
_log = logging.getLogger(__name__)


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
        """Take the folder of an earlier run to go on with it; its settings. Nothing is removed yet: see ``tidy``.

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

    def tidy(self) -> None:
        """Remove what a process that was killed left half: rounds without a manifest, and models.

        Raises:
            RuntimeError: the folder is not open.
        """
        self._check_open()
        for folder in self.path.glob("rounds/*"):
            if not (folder / MANIFEST).exists():  # nobody can go on from it, and the room may be wanted
                shutil.rmtree(folder, ignore_errors=True)
        for half in self.path.glob(".*.part"):
            shutil.rmtree(half, ignore_errors=True)

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
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                folder.mkdir(parents=True)
                files: dict[str, File] = {}
                for name in sorted(parties):
                    for path in save_party(folder, name, parties[name]):
                        files[path.name] = measure(path)
                self.complete(round, list(parties), files)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise

    def complete(self, round: int, parties: Sequence[str], files: Mapping[str, File]) -> None:
        """A round is whole: every party wrote its files. Then all but the last two rounds are removed.

        Args:
            round: its number; one that was stored before is replaced.
            parties: their names.
            files: what they reported. Those that are not in this folder are on their own machines.

        Raises:
            SplitlmError: the manifest cannot be written; earlier rounds are as they were.
            RuntimeError: the folder is not open.
        """
        folder = self._round(round)
        self._check_open()
        with self._writing():
            folder.mkdir(parents=True, exist_ok=True)
            here = {path.name for path in folder.iterdir()}
            for stray in here - set(files) - {MANIFEST}:  # of an attempt at this round that was not brought to its end
                (folder / stray).unlink(missing_ok=True)
            manifest = Manifest(
                round=round,
                identity=self.identity,
                parties=tuple(sorted(parties)),
                files=dict(files),
                elsewhere=tuple(sorted(set(files) - here)),
            )
            flush(folder.parent)
            write(folder / MANIFEST, _json(msgspec.to_builtins(manifest)))
        for old in self._complete()[KEEP:]:
            with contextlib.suppress(OSError):  # what stays behind is removed after a later round
                (self._round(old) / MANIFEST).unlink()
                shutil.rmtree(self._round(old))

    def latest(self) -> int | None:
        """The newest round whose files are all as they were written; None where none was ever completed.

        A damaged one is passed over, with a warning that says what is wrong.

        Raises:
            CheckpointError: a round is of another model or cut, or rounds were completed and none of them is whole.
        """
        faults: list[CheckpointError] = []
        for number in self._complete():
            found = self._faults(number)
            if not found:
                return number
            _log.warning("Round %d is passed over: %s", number, found[0])
            faults += found
        if faults or (trace := completed(self.path)):
            names = [f"{Path(fault.where).relative_to(self.path)} ({fault.what})" for fault in faults]
            more = f"; and {len(names) - NAMED} more" if len(names) > NAMED else ""
            why = f"these files are damaged: {'; '.join(names[:NAMED])}{more}" if faults else trace
            raise CheckpointError(
                f"Rounds of this run were completed, and none of them can be gone on with: {why}",
                where=str(self.path / "rounds"),
                expected=f"a round with its {MANIFEST} and the files that it names, as they were written",
                remedy="Restore them, or begin again in another folder, without --resume; nothing was removed",
            )
        return None

    def _faults(self, round: int) -> list[CheckpointError]:
        """What is damaged of a round.

        Raises:
            CheckpointError: it is of another model or cut.
        """
        try:
            manifest = self.manifest(round)
        except CheckpointError as error:
            return [error]
        self._check_identity(round, manifest)
        found = []
        for name in sorted(set(manifest.files) - set(manifest.elsewhere)):
            try:
                verify(self._round(round), manifest.files, name)
            except CheckpointError as error:
                found.append(error)
        return found

    def load(self, round: int, party: str) -> Party:
        """What a party stored in a round, in memory of its own, on the CPU.

        Raises:
            CheckpointError: the round is of another model or cut, is damaged, or is not there.
            UsageError: the party had no part in it.
        """
        manifest = self.manifest(round)
        self._check_identity(round, manifest)
        if party not in manifest.parties:
            raise UsageError(
                f"There is no party {party!r}",
                where=str(self._round(round)),
                expected=f"one of {', '.join(manifest.parties)}",
            )
        for name in files_of(party):
            verify(self._round(round), manifest.files, name)
        return load_party(self._round(round), party)

    def manifest(self, round: int) -> Manifest:
        """What a round consists of.

        Raises:
            CheckpointError: it is not there, or its manifest is damaged.
        """
        return read_manifest(self._round(round))

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
        return round_folder(self.path, round)

    def _complete(self) -> list[int]:
        """Rounds that have a manifest, newest first."""
        found = (path.parent.name for path in self.path.glob(f"rounds/*/{MANIFEST}"))
        return sorted((int(name) for name in found if name.isdecimal()), reverse=True)

    def _check_identity(self, round: int, manifest: Manifest) -> None:
        if manifest.identity != self.identity:
            raise CheckpointError(
                f"The round is of {manifest.identity}",
                where=str(self._round(round)),
                expected=str(self.identity),
                remedy="Go on with the settings that the run began with, or begin another run",
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


def completed(run: Path) -> str:
    """What shows, in a run's folder without any manifest, that a round was completed all the same; "" for nothing.

    A process that was killed in its first round leaves files of that round, and perhaps its model, but no row of it.
    """
    found = sorted(path.name for path in run.glob("rounds/*") if path.name.isdecimal())
    if any(map(int, found)):
        return f"there is no {' and no '.join(f'rounds/{name}/{MANIFEST}' for name in found)}"
    try:
        with (run / "metrics.jsonl").open("rb") as rows:
            if any(_is_round(row) for row in rows):
                return f"metrics.jsonl has a round, and there is no rounds/*/{MANIFEST}"
    except FileNotFoundError:  # a run that got as far as a model has rows
        made = [name for name in ("model", "adapter") if (run / name).exists()]
        return f"{made[0]} is here, and no {MANIFEST}" if made else ""
    except OSError as error:
        return f"metrics.jsonl cannot be read ({error.strerror or error})"
    return ""


def _is_round(row: bytes) -> bool:
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        said = msgspec.json.decode(row)
        return isinstance(said, dict) and said.get("record") == "round"
    return False


def _json(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
