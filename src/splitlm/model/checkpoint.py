"""Checkpoints that other programs load: a model directory, a PEFT adapter directory, and the two merged.

Everything is written beside its place and then renamed into it. Whoever looks sees the old one or the new one, whole.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from splitlm.core.errors import CheckpointError, ModelError, UsageError
from splitlm.model.border import foreign, reason
from splitlm.model.header import read_header
from splitlm.model.index import read_json

SHARD_BYTES = 5_000_000_000
"""A file of weights is cut above this."""
PEFT_PREFIX = "base_model.model."
Task = Literal["causal", "classify"]
_TASKS = {"causal": "CAUSAL_LM", "classify": "SEQ_CLS"}
_COPIED = re.compile(
    r"(tokenizer|special_tokens_map|added_tokens|chat_template|vocab|merges|generation_config)[\w.-]*"
    r"\.(json|jinja|txt|model)|(spiece|sentencepiece[\w.]*|tokenizer)\.model"
)
"""Files of a model directory that go with its weights."""
_WEIGHTS = re.compile(r"((pytorch_)?model(-\d+-of-\d+)?|adapter_model)\.(safetensors|bin)")
_BESIDE = re.compile(r"(adapter_)?config\.json|(pytorch_)?model\.(safetensors|bin)\.index\.json|README\.md")
"""Files of a model's or an adapter's directory; together with those that are copied, all that may be replaced."""
_AT_CWD, _EXCHANGE = -100, 2  # of Linux's renameat2


def save_full(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Any,
    tokenizer_folder: Path | None = None,
    *,
    architecture: str = "",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """A model directory that ``from_pretrained`` loads. One that was there before is replaced in one step.

    Args:
        folder: where to.
        tensors: by the original keys of the whole model. A tied head may be among them; it is stored once.
        config: of transformers; its element type becomes that of the tensors.
        tokenizer_folder: whose tokenizer files are copied along; None for none.
        architecture: the model's class in transformers; by default the one that its family is trained as, which need
            not be what ``config`` says: that may come from a directory with another head.
        shard_bytes: largest size of one file of weights.

    Raises:
        CheckpointError: a head that is tied in the config is not equal to the embedding.
        UnknownFamilyError: no architecture is named, and the config is of no family.
        UsageError: the folder holds something that is no checkpoint.
        ModelError: the files cannot be written; what was there before is untouched.
    """
    config = copy.deepcopy(config)
    state = _once(tensors, config)
    kinds = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    if len(kinds) == 1:
        config.dtype = kinds.pop()
    config.architectures = [architecture or _trained_as(config)]
    with new_folder(folder) as temporary:
        config.save_pretrained(temporary)
        _save_shards(temporary, state, shard_bytes)
        if tokenizer_folder is not None:
            for path in sorted(tokenizer_folder.iterdir()):
                if path.is_file() and _COPIED.fullmatch(path.name):
                    shutil.copyfile(path, temporary / path.name)


def save_adapter(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    r: int,
    alpha: int,
    targets: Sequence[str],
    task: Task,
    base_name: str,
    modules_to_save: Sequence[str] = (),
    fan_in_fan_out: bool = False,
) -> None:
    """A directory that ``PeftModel.from_pretrained`` loads. One that was there before is replaced in one step.

    Args:
        folder: where to.
        tensors: by peft's keys: ``base_model.model.<key of the module>.lora_A.weight`` and ``…lora_B.weight``, and
            ``base_model.model.<key>`` for what is stored whole.
        r: rank.
        alpha: scale of the product, divided by ``r``.
        targets: names of the adapted modules.
        task: what the head is for.
        base_name: path or hub id of the model that was adapted.
        modules_to_save: names of modules that are stored whole, such as a classifier.
        fan_in_fan_out: whether the adapted matrices lie the other way round (GPT-2's Conv1D).

    Raises:
        CheckpointError: a key that peft would not know.
        UsageError: the folder holds something that is no checkpoint.
        ModelError: the files cannot be written; what was there before is untouched.
    """
    from peft import LoraConfig

    whole = tuple(f".{name}." for name in modules_to_save)
    for key in tensors:
        known = re.search(r"\.lora_(embedding_)?[AB](\.weight)?$", key) or any(name in key for name in whole)
        if not key.startswith(PEFT_PREFIX) or not known:
            raise CheckpointError(
                f"The tensor {key!r} cannot be stored in an adapter",
                where=str(folder),
                expected=f"keys {PEFT_PREFIX}….lora_A.weight or …lora_B.weight, or of one of modules_to_save",
            )
    config = LoraConfig(
        r=r,
        lora_alpha=alpha,
        target_modules=list(targets),
        task_type=_TASKS[task],
        base_model_name_or_path=base_name,
        modules_to_save=list(modules_to_save) or None,
        fan_in_fan_out=fan_in_fan_out,
        lora_dropout=0.0,
        bias="none",
        inference_mode=True,
    )
    with new_folder(folder) as temporary:
        config.save_pretrained(str(temporary))
        save_tensors(temporary / "adapter_model.safetensors", tensors)


def merge(base_folder: Path, adapter_folder: Path, out: Path) -> None:
    """The full model that a base and its adapter make together, in the base's element type, as ``save_full`` writes it.

    Raises:
        CheckpointError: a folder is damaged, or the adapter is not of this base.
        UsageError, ModelError: as ``save_full``.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from splitlm.model.oneatatime import one_at_a_time
    from splitlm.model.quiet import no_bars

    said = read_json(adapter_folder / "adapter_config.json")
    entries = read_header(adapter_folder / "adapter_model.safetensors")
    options: dict[str, Any] = {"dtype": "auto", "local_files_only": True, "trust_remote_code": False}
    auto = AutoModelForCausalLM
    if said.get("task_type") == _TASKS["classify"]:
        auto = AutoModelForSequenceClassification
        heads = [e.shape[0] for key, e in entries.items() if re.search(r"\.(classifier|score)\.weight$", key)]
        if heads:  # the base may have a head of another size, or none
            options |= {"num_labels": heads[0], "ignore_mismatched_sizes": True}
    expected = f"an adapter of the model in {base_folder}"
    with one_at_a_time(), no_bars(), foreign("The adapter cannot be merged", str(adapter_folder), expected):
        base = auto.from_pretrained(str(base_folder), **options)
        ours = {PEFT_PREFIX + name for name, _ in base.named_modules()}
        for key in sorted(entries):
            module = re.sub(r"\.(lora_(embedding_)?[AB](\.weight)?|weight|bias)$", "", key)
            if module not in ours:
                raise CheckpointError(
                    f"There is no module for the tensor {key!r}", where=str(adapter_folder), expected=expected
                )
        merged: Any = PeftModel.from_pretrained(base, str(adapter_folder), local_files_only=True).merge_and_unload()
    save_full(out, merged.state_dict(), merged.config, base_folder, architecture=type(merged).__name__)


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file that is on the disk when this returns. Tensors that share memory are stored each.

    Raises:
        OSError: it cannot be written.
    """
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for key in sorted(tensors):
        tensor = tensors[key].detach().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        plain[key] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    try:
        save_file(plain, path, metadata={"format": "pt"})
    except SafetensorError as error:  # its text holds the system's reason
        raise OSError(reason(error)) from error
    flush(path)


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk.

    Raises:
        OSError: they cannot be written.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unwritable(path: Path, error: OSError) -> ModelError:
    """The paragraph of a disk that is full or closed."""
    return ModelError(
        f"It cannot be written ({error.strerror or error})",
        where=str(path),
        expected="a folder that can be written, with room for it",
        remedy="Free space or choose another folder; what was written before is as it was",
    )


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of ``folder`` when the block ends, and vanishes when it fails.

    Raises:
        UsageError: ``folder`` holds something that is no checkpoint, or is a file.
        ModelError: it cannot be written.
    """
    try:
        folder = folder.absolute()
        check_place(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
        try:
            yield temporary
            temporary.chmod(0o755)
            for path in temporary.iterdir():
                flush(path)
            flush(temporary)
            check_place(folder)  # filling takes a while
            _take_place(temporary, folder)
            flush(folder.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # after an exchange, the old one lies here
    except OSError as error:
        raise unwritable(folder, error) from error


def check_place(folder: Path) -> None:
    """Make sure that nothing can be lost by replacing a folder but an earlier model or adapter.

    Raises:
        UsageError: it is a file, or holds anything else; the first such file is named.
        OSError: it cannot be looked into.
    """
    if not folder.exists():
        return
    paths = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    names = {path.name for path in paths}
    for path in paths:
        if path.name == "base" and path.is_dir() and "adapter_config.json" in names:
            check_place(path)  # ``export`` writes the model that an adapter changes there
        elif path.is_dir() or not any(known.fullmatch(path.name) for known in (_WEIGHTS, _BESIDE, _COPIED)):
            raise _taken(path, "It belongs to no checkpoint, and would be lost")
    if names and not (names & {"config.json", "adapter_config.json"} and any(map(_WEIGHTS.fullmatch, names))):
        raise _taken(folder, f"{min(names)!r} lies here, and no checkpoint: no config with weights")


def _taken(path: Path, what: str) -> UsageError:
    expected = "a new or empty folder, or one with a model or an adapter and nothing else"
    return UsageError(what, where=str(path), expected=expected, remedy="Choose another folder, or remove it")


def _take_place(new: Path, folder: Path) -> None:
    """Rename, or exchange the two where both are there: at no moment is neither in place.

    A system that has no exchange renames twice; a crash between leaves the old one as ``.<name>.old`` beside it.
    """
    if not folder.exists():
        new.rename(folder)
        return
    if _exchange(new, folder):
        return
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Let two paths swap what they name; False where the system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    done = call is not None and call(_AT_CWD, os.fsencode(one), _AT_CWD, os.fsencode(other), _EXCHANGE) == 0
    return bool(done)


def _trained_as(config: Any) -> str:
    """The class of transformers that a model of this config is trained as: of its family's task."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    from splitlm.model.family import find_family

    classes = {"causal": MODEL_FOR_CAUSAL_LM_MAPPING, "classify": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING}
    name: str = classes[find_family(config.model_type).task][type(config)].__name__
    return name


def _once(tensors: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The tensors without a head that is the embedding again."""
    from splitlm.model.family import find_family

    state = dict(tensors)
    if not getattr(config, "tie_word_embeddings", False):
        return state
    family = find_family(config.model_type)
    table, head = state.get(family.embed_key), state.get(family.head_key)
    if family.task != "causal" or table is None or head is None:
        return state
    if not torch.equal(table, head):
        raise CheckpointError(
            f"{family.head_key!r} and {family.embed_key!r} differ",
            where="tie_word_embeddings",
            expected="one table, since the config ties them",
            remedy="Save with tie_word_embeddings false",
        )
    del state[family.head_key]
    return state


def _save_shards(folder: Path, state: Mapping[str, Tensor], limit: int) -> None:
    """One file of weights, or several with an index, as transformers names them."""
    from huggingface_hub import split_torch_state_dict_into_shards

    apart = {key: tensor.detach() for key, tensor in state.items()}
    split = split_torch_state_dict_into_shards(apart, max_shard_size=limit)
    for name, keys in split.filename_to_tensors.items():
        save_tensors(folder / name, {key: apart[key] for key in keys})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
