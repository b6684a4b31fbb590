"""What a run made, taken out of its folder: the model, the adapter, or the two merged."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from splitlm.core.errors import UsageError
from splitlm.finetune.output import ADAPTER, BASE, MODEL, is_plain, write_base
from splitlm.finetune.recipe import Recipe, Resolve, model_folder, open_recipe
from splitlm.finetune.runfile import read_run
from splitlm.model.checkpoint import merge, new_folder
from splitlm.model.header import read_header
from splitlm.model.index import read_json

Kind = Literal["as it is", "adapter", "merged"]


def export(run: Path, to: Path, kind: Kind, resolve: Resolve) -> str:
    """Write the model or the adapter of a run as a directory of its own; what it is, in words.

    Args:
        run: a run's folder.
        to: where to; a new or an empty folder, or a checkpoint that is replaced.
        kind: ``as it is`` takes what the run made.
        resolve: finds the model that the run began with; asked only where there is an adapter.

    Raises:
        UsageError: it is no run's folder, the run made nothing, or nothing of this kind; ``to`` holds something else.
        CheckpointError: a file is damaged.
        ModelMissingError: the model that an adapter changes is not here.
        SplitlmError: it cannot be written.
    """
    if not (run / "config.yaml").is_file():
        raise UsageError("There is no run here", where=str(run), expected="the folder of a run, with its config.yaml")
    model, adapter = run / MODEL, run / ADAPTER
    if model.is_dir():
        if kind != "as it is":
            raise UsageError(
                "The run trained every weight: it has no adapter",
                where=str(run),
                expected="a run with fine-tune.name: LoRA",
                remedy="Leave --merge and --adapter out: the whole model is exported",
            )
        _copy(model, to)
        return "a model that from_pretrained loads"
    if not adapter.is_dir():
        raise UsageError(
            "The run has made no model",
            where=str(run),
            expected=f"{MODEL} or {ADAPTER} in it, which a complete round leaves",
            remedy="Set server.parameters.save: True, or wait for the end of its first round",
        )
    return _export_adapter(run, adapter, to, kind, resolve)


def _export_adapter(run: Path, adapter: Path, to: Path, kind: Kind, resolve: Resolve) -> str:
    recipe = _recipe(run, adapter, resolve)
    if kind == "merged":
        with _base(recipe) as base:
            merge(base, adapter, to)
        return "a model with the adapter merged into it, which from_pretrained loads"
    if is_plain(recipe):
        _copy(adapter, to)
        return f"an adapter of {recipe.files.folder}, which PeftModel.from_pretrained loads"
    with new_folder(to) as temporary:
        shutil.copytree(adapter, temporary, dirs_exist_ok=True)
        said = read_json(adapter / "adapter_config.json") | {"base_model_name_or_path": str(to.absolute() / BASE)}
        (temporary / "adapter_config.json").write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    write_base(recipe, to / BASE)
    return f"an adapter of the model in {to / BASE}, which PeftModel.from_pretrained loads"


def _recipe(run: Path, adapter: Path, resolve: Resolve) -> Recipe:
    """The run's, with a head as large as the one that was trained."""
    config = read_run(run / "config.yaml")
    heads = [
        entry.shape[0]
        for key, entry in read_header(adapter / "adapter_model.safetensors").items()
        if re.search(r"\.(classifier|score)\.weight$", key)
    ]
    return open_recipe(config, model_folder(config, resolve), heads[0] if heads else 0)


@contextmanager
def _base(recipe: Recipe) -> Iterator[Path]:
    """A directory with the model that the run began with."""
    if is_plain(recipe):
        yield recipe.files.folder
        return
    with tempfile.TemporaryDirectory(prefix="splitlm-base-") as folder:
        write_base(recipe, Path(folder) / BASE)
        yield Path(folder) / BASE


def _copy(source: Path, to: Path) -> None:
    if to.resolve() == source.resolve():
        raise UsageError("It lies there already", where=str(to), expected="another folder")
    with new_folder(to) as temporary:
        for path in sorted(source.iterdir()):
            shutil.copyfile(path, temporary / path.name)
