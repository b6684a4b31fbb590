"""What a user can do wrong: one paragraph that says where and what to do, the right exit code, nothing left behind."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from splitlm.cli.console import Console

from .command import Done, is_free, run

PROMPT = ("--prompt", "a", "-n", "2", "--no-trace")


def refused(done: Done, code: int, *says: str) -> None:
    """It ended with this code and one paragraph that says all this; no result."""
    assert done.code == code, done.err
    for text in says:
        assert text in done.paragraph, done.err
    assert done.paragraph.endswith((".", "?"))
    assert done.out == ""


@pytest.fixture
def model(tiny: Callable[[str], Path]) -> Path:
    """A whole model of five blocks."""
    return tiny("llama")


@pytest.fixture
def damaged(model: Path, tmp_path: Path) -> Callable[..., Path]:
    """``damaged(name, data)``: a copy of the model with that file replaced, or gone without data."""

    def make(name: str, data: bytes | None = None, source: Path = model) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(source, folder)
        (folder / name).unlink()
        if data is not None:
            (folder / name).write_bytes(data)
        return folder

    return make


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working directory of our own, in which no run's folder and no thread may be left."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    yield
    assert not list(Path("runs").glob("*"))
    assert [t for t in threading.enumerate() if t.name.startswith("splitlm-loop")] == []


def test_a_model_that_is_not_there(damaged: Callable[..., Path], tmp_path: Path) -> None:
    refused(run("generate", tmp_path / "nothing", "--prompt", "a"), 4, "nothing", "no such directory", "Expected")
    refused(run("plan", tmp_path / "nothing"), 4, "no such directory")
    refused(run("generate", damaged("config.json"), "--prompt", "a"), 4, "config.json is missing")


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        ("model.safetensors", None, "There is no model.safetensors"),
        ("model.safetensors", lambda data: data[: len(data) // 2], "truncated"),
        ("model.safetensors", lambda data: data[:5], "5 bytes"),
        ("model.safetensors", lambda _: b"not a tensor" * 99, "not safetensors"),
        ("config.json", lambda data: data[:20], "JSON"),
        ("config.json", lambda _: b"[1]", "JSON"),
        ("tokenizer.json", lambda data: data[:100], "tokenizer"),
        ("tokenizer.json", lambda _: b"\xff\xfe\x00", "tokenizer"),
        ("tokenizer.json", None, "no tokenizer"),
    ],
)
def test_a_damaged_file(
    file: str, change: Callable[[bytes], bytes] | None, says: str, model: Path, damaged: Callable[..., Path]
) -> None:
    folder = damaged(file, change((model / file).read_bytes()) if change else None)
    refused(run("generate", folder, "--prompt", "a"), 4, says, str(folder))


def test_a_family_that_is_unknown(model: Path, damaged: Callable[..., Path]) -> None:
    config = json.loads((model / "config.json").read_text()) | {"model_type": "mamba"}
    folder = damaged("config.json", json.dumps(config).encode())
    for verb in (("generate", *PROMPT), ("plan",)):
        refused(run(verb[0], folder, *verb[1:]), 4, "'mamba'", "config.json", "llama", "--model-family")
    refused(run("generate", model, *PROMPT, "--model-family", "zorg"), 4, "--model-family", "'zorg'", "llama")
    refused(run("generate", model, *PROMPT, "--model-family", "gpt2"), 4)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--cuts 3,9", "--cuts: Cut 9 is out of range"),
        ("--cuts 0,3", "Cut 0 is out of range"),
        ("--cuts 3,2", "do not increase"),
        ("--cuts 3,3", "do not increase"),
        ("--cuts x,2", "'x,2' are no cuts"),
        ("--cuts 1,2 --stages 2", "--stages 2 and --cuts 1,2 do not agree. Expected 3 stages"),
        ("--stages 6", "--stages: 6 stages for 5 blocks"),
        ("--stages 0", "--stages: It is 0. Expected at least 1"),
        ("--stages -3", "--stages: It is -3"),
        ("--stages many", "--stages"),
        ("--tail-blocks -1 --private --stages 2", "--tail-blocks: It is -1"),
        ("--tail-blocks 1 --stages 2", "--private"),
        ("--tail-blocks 5 --private --stages 2", "--tail-blocks: 5 tail blocks do not fit a model of 5 blocks"),
        ("--private", "at least two stages"),
        ("--dtype int8", "--dtype: 'int8'"),
    ],
)
@pytest.mark.parametrize("verb", ["generate", "plan"])
def test_a_cut_that_cannot_be(verb: str, options: str, says: str, model: Path) -> None:
    refused(run(verb, model, *(PROMPT if verb == "generate" else ()), *options.split()), 2, says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--threads -1", "--threads: It is -1"),
        ("--threads 1025", "--threads: threads is 1025. Expected a whole number from 0 to 1024"),
        ("--threads 3000000000", "--threads: threads is 3000000000"),
        ("--max-new-tokens 0", "--max-new-tokens: It is 0"),
        ("--max-new-tokens -1", "--max-new-tokens: It is -1"),
        ("--prefill-chunk 0", "--prefill-chunk: It is 0"),
        ("--deadline 0", "--deadline: It is 0"),
        ("--deadline -1", "--deadline: It is -1"),
        ("--deadline nan", "--deadline: It is nan"),
        ("--deadline soon", "--deadline"),
        ("--ctrl-timeout 0", "--ctrl-timeout: It is 0"),
        ("--temperature -1", "--temperature"),
        ("--top-p 0", "--top-p"),
        ("--top-k -1", "--top-k"),
        ("--top-k 99999999999999999999999", "--top-k: top-k is 99999999999999999999999"),
        ("--loader mmap", "--loader: 'mmap'"),
        ("--compute quick", "--compute: 'quick'"),
        ("--log-level loud", "--log-level: 'loud'"),
        ("--listen 7000", "--listen: '7000' is no address. Expected HOST:PORT"),
        ("--listen 127.0.0.1:70000 --stages 2", "--listen: '127.0.0.1:70000'"),
        ("--listen 127.0.0.1:0", "how many stages"),
        ("--token-file nowhere", "--token-file nowhere"),
        ("--frobnicate", "No such option: --frobnicate"),
        ("--prompt", "--prompt"),
    ],
)
def test_an_option_that_is_wrong(options: str, says: str, model: Path) -> None:
    refused(run("generate", model, *PROMPT, *options.split()), 2, says)


def test_a_verb_that_is_wrong() -> None:
    refused(run("genrate"), 2, "genrate", "generate")
    refused(run("generate"), 2, "MODEL", "splitlm generate --help")
    assert run().code == 2


def test_a_folder_that_cannot_be_made(tmp_path: Path, model: Path) -> None:
    """Below a file there is no folder, whoever asks."""
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        done = run("generate", model, "--prompt", "a", "--trace-dir", tmp_path / place)
        refused(done, 2, str(tmp_path / place), "--trace-dir", "--no-trace")


def test_a_prompt_that_cannot_be(model: Path) -> None:
    refused(run("generate", model, "--no-trace", "--prompt", "a" * 200), 2, "201 tokens", "128")
    refused(run("generate", model, *PROMPT, "--chat"), 2, "chat template")
    refused(run("generate", model, "--no-trace", "--prompt", "\udcff"), 2, "Unicode")


def test_a_prompt_of_no_token_needs_a_bos(tarot: Path, tmp_path: Path) -> None:
    """gpt2-tarot's tokenizer adds nothing by itself; without a BOS in any file there is nothing to begin with."""
    folder = tmp_path / "model"
    shutil.copytree(tarot, folder)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        data: dict[str, Any] = json.loads((folder / name).read_text())
        for key in ("bos_token_id", "bos_token", "add_bos_token"):
            data.pop(key, None)
        (folder / name).write_text(json.dumps(data))
    done = run("generate", folder, "--no-trace", "--prompt", "", "--stages", "2")
    refused(done, 2, "--prompt", "no token")
    assert "opening" not in done.err  # found before anything is loaded
    assert run("generate", tarot, "--no-trace", "--prompt", "", "-n", "2").code == 0
    refused(run("generate", tarot, "--no-trace", "--prompt", "a " * 99), 2, "64")


def test_a_port_that_is_taken(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        where = f"127.0.0.1:{held.getsockname()[1]}"
        refused(run("generate", model, *PROMPT, "--stages", "2", "--listen", where), 3, where, "in use")


def test_a_host_that_is_not_ours(model: Path) -> None:
    listen = ("generate", model, *PROMPT, "--stages", "2", "--listen")
    refused(run(*listen, "no-such-host.invalid:7000"), 3, "no-such-host.invalid", "cannot be resolved")
    refused(run(*listen, "192.0.2.1:7000"), 3, "192.0.2.1", "not an address of this machine")


def test_stages_that_never_come(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    done = run("generate", model, *PROMPT, "--stages", "3", "--listen", f"127.0.0.1:{port}", "--deadline", "0.3")
    refused(done, 3, f"127.0.0.1:{port}", "waited 0.3 s for 2 stages", "0 came", "--deadline")
    assert is_free(port)


def test_a_head_that_never_comes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        where = f"127.0.0.1:{held.getsockname()[1]}"
    done = run("stage", "--join", where, "--deadline", "0.3", "--no-trace")
    refused(done, 3, where, "waited 0.3 s for the head", "refused")
    refused(run("stage", "--join", "no-such-host.invalid:1", "--no-trace"), 3, "cannot be resolved")
    refused(run("stage", "--join", where, "--threads", "1025", "--no-trace"), 2, "--threads: threads is 1025")


@pytest.mark.parametrize("verb", ["generate", "stage"])
def test_a_stage_takes_nothing_out_of_a_folder_that_it_shares(verb: str, tmp_path: Path) -> None:
    """A ring on this machine may be writing there; only settings of an older stage are replaced."""
    old = json.dumps({"verb": verb, "config": {"model": "theirs"}})
    names, shared = ["trace-node0.jsonl", "trace-node1.jsonl", "stage-1.log", "note.txt"], tmp_path / "shared"
    shared.mkdir()
    for name in names:
        (shared / name).write_text(name)
    (shared / "run.json").write_text(old)
    assert run("stage", "--join", "127.0.0.1:1", "--deadline", "0.1", "--trace-dir", shared).code == 3
    assert [(shared / name).read_text() for name in names] == names
    assert ((shared / "run.json").read_text() == old) == (verb == "generate")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("", "--join"),
        ("--layer-begin 2 --layer-end 4", "lacks --recv, --send, --ctrl"),
        ("--recv 127.0.0.1:1", "lacks --layer-begin, --layer-end, --send, --ctrl"),
        ("--layer-begin 4 --layer-end 4 --recv a:1 --send a:2 --ctrl a:3", "blocks from 4 to 4"),
        ("--layer-begin 2 --layer-end 4 --recv a:1 --send a:2 --ctrl a:3 --join a:4", "exclude each other"),
        ("--role full --join a:4", "exclude each other"),
        ("--role half", "--role: 'half'"),
        ("--role full", "--prompt"),
        ("--join a:1 --prompt x", "--prompt: Only the first stage"),
        ("--join a:1 -n 5", "No such option"),
        ("--join a:1 --max-new-tokens 5", "--max-new-tokens: Only the first stage"),
        ("--join a:1 --private", "--private: Only the first stage"),
        ("--join a:1 --model-family llama", "--model-family: Only the first stage"),
        ("--join a:1 --loader hf", "--loader: Only the first stage"),
        ("--join a:1 --dtype float32", "--dtype: Only the first stage"),
        ("--join a:1 --prefill-chunk 8", "--prefill-chunk: Only the first stage"),
        ("--role full --prompt x --listen a:1", "--listen: The first stage does not take it"),
        ("--role full --prompt x --advertise a", "--advertise: The first stage does not take it"),
        ("--layer-begin 2 --layer-end 4 --recv a:1 --send a:2 --ctrl a:3 --listen a:4", "--listen: A fixed place"),
        ("--join nowhere", "--join: 'nowhere'"),
        ("--join a:1 --threads -1", "--threads"),
        ("--join a:1 --deadline 0", "--deadline"),
    ],
)
def test_a_stage_that_knows_no_place(options: str, says: str, model: Path) -> None:
    refused(run("stage", model, "--no-trace", *options.split()), 2, says)


def test_common_options_stand_before_and_after_the_verb(model: Path) -> None:
    """--quiet, --log-level, --log-json and --debug."""
    loud, before = run("plan", model), run("--quiet", "plan", model)
    after = run("plan", model, "-q")
    assert "· " in loud.err and before.err == after.err == ""
    assert loud.out == before.out == after.out
    refused(run("--log-level", "loud", "plan", model), 2, "--log-level")
    from splitlm.core.errors import CutError

    for words in (("--debug", "plan", model, "--stages", "9"), ("plan", model, "--stages", "9", "--debug")):
        with pytest.raises(CutError):
            run(*words)


def test_a_logged_exception_is_whole_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, its traceback a field of its own; a line without an exception has no such field."""
    logger = logging.getLogger("splitlm")
    before = (logger.handlers, logger.level, logger.propagate)
    try:
        Console().set(log_json=True)
        try:
            raise ValueError("two\nlines")
        except ValueError:
            logger.getChild("x").exception("it broke", stack_info=True)
        logger.warning("plain")
    finally:
        logger.handlers, logger.level, logger.propagate = before
    broke, plain = map(json.loads, capsys.readouterr().err.splitlines())
    assert (broke["message"], broke["level"], broke["logger"]) == ("it broke", "error", "splitlm.x")
    assert broke["exception"].startswith("Traceback") and broke["exception"].endswith("ValueError: two\nlines")
    assert "Stack" in broke["stack"] and set(plain) == {"time", "level", "logger", "message"}
