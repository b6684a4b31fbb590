"""A GGUF file, converted once to a safetensors directory in a cache folder, however many processes ask at once."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import io
import os
import shutil
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from splitlm.core.errors import CheckpointError, ModelError, ModelMissingError
from splitlm.model.oneatatime import one_at_a_time

Progress = Callable[[str], None]

_VERSION = 1
"""Raise it when the converted directory changes: older ones are then made again."""
_MIB = 1 << 20


def convert(source: Path, cache: Path, progress: Progress, *, dated: bool = True) -> Path:
    """The converted directory of a GGUF file, made now if the cache lacks it.

    The directory appears whole or not at all. A lock makes other processes wait; a killed one leaves nothing that
    stands in the way.

    Args:
        source: the GGUF file.
        cache: the folder of all converted models.
        progress: told when there is something to wait for.
        dated: whether the file's time may tell its content. Not where a package brings it: each install dates it anew,
            and every environment would add a copy of the same model.

    Raises:
        CheckpointError: the file is not GGUF, is truncated, or holds what transformers cannot read.
        ModelMissingError: the gguf package is not installed.
        ModelError: the cache folder cannot be written.
    """
    target = cache / f"{source.stem}-{_digest(source, dated)}"
    if _made(target):
        return target
    _check(source)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(target, progress):
            if not _made(target):
                progress(f"converting {source.name} to safetensors, once; this takes about a minute")
                partial = target.with_name(f"{target.name}.partial")
                shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
                try:
                    _write(source, partial)
                    partial.rename(target)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"the converted model cannot be written ({error.strerror or error})",
            where=str(cache),
            expected="a folder with free space for the weights in float32",
            remedy="Free some space, or set XDG_CACHE_HOME to a folder that has it",
        ) from error
    return target


def _made(target: Path) -> bool:
    return (target / "config.json").is_file()


def _digest(source: Path, dated: bool) -> str:
    """Names the file's content without reading gigabytes."""
    try:
        stat = source.stat()
        with source.open("rb") as file:
            head = file.read(_MIB)
    except OSError as error:
        raise CheckpointError(
            f"the file cannot be read ({error.strerror})", where=str(source), expected="a GGUF file"
        ) from error
    if head[:4] != b"GGUF":
        raise CheckpointError(
            f"this is not a GGUF file: it begins with {head[:4]!r}",
            where=str(source),
            expected="b'GGUF'",
            remedy="Download it again (a Git LFS pointer or an error page may have been saved in its place)",
        )
    digest = hashlib.sha256(f"{_VERSION} {stat.st_size} {stat.st_mtime_ns if dated else 0} ".encode())
    digest.update(head)
    return digest.hexdigest()[:16]


def _check(source: Path) -> None:
    """Read the file's index and see that every tensor it lists is there."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelMissingError(
            "reading a GGUF file needs the gguf package",
            where=str(source),
            remedy='Run: pip install "splitlm[gguf]", or give a safetensors directory with --model DIR',
        )
    from gguf import GGUFReader

    try:
        GGUFReader(source)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, struct.error) as error:
        raise CheckpointError(
            f"the GGUF file is truncated or damaged ({error})",
            where=str(source),
            expected="all the tensors that its index lists",
            remedy="Download it again",
        ) from error


@contextlib.contextmanager
def _locked(target: Path, progress: Progress) -> Iterator[None]:
    """Holds the target's lock. The kernel drops it with the process, so the file that stays behind means nothing."""
    with target.with_name(f"{target.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that converts {target.name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(source: Path, target: Path) -> None:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from splitlm.model.border import foreign

    folder, name = str(source.parent), source.name
    with one_at_a_time(), _quiet():
        with foreign(
            "transformers cannot convert this GGUF file",
            str(source),
            "an architecture and quantization that transformers reads",
            "Give the model's safetensors directory or hub id instead",
        ):
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True)
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                gguf_file=name,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
                local_files_only=True,
            )
        try:
            tokenizer.save_pretrained(target)
            model.save_pretrained(target)
        except SafetensorError as error:
            raise OSError(str(error)) from error
    for path in target.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())  # the rename must not outlive the content when the power goes


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the conversion's bars and warnings off the terminal, and puts every setting back."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        # One bar in transformers' GGUF reader obeys none of its settings and goes straight to stderr.
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
