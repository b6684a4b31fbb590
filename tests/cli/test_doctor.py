"""``splitlm doctor``: it finds what is wrong, and only that."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import ssl
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from splitlm.cli import checkup
from splitlm.cli.checkup import Finding
from tests.link.certificates import folders, good

from .command import ROOT, run


def findings(*words: str | Path) -> dict[str, Finding]:
    """What it found, by name; the exit code says whether a failure is among it."""
    done = run("doctor", *words, "--json", "-q")
    found = {entry["name"]: Finding(**entry) for entry in json.loads(done.out)}
    failed = any(finding.verdict == "fail" for finding in found.values())
    assert done.code == failed
    assert ("checks failed" in done.err) == failed
    return found


def test_the_ranges_are_those_of_the_package() -> None:
    """What it calls supported is what pip would install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {re.split(r"[><]", entry)[0]: entry for entry in project["dependencies"]}
    for name, (low, high) in checkup.SUPPORTED.items():
        assert asked[name] == f"{name}>={low},<{high}"
    assert project["requires-python"] == f">={'.'.join(map(str, checkup.PYTHON))}"


def test_a_sound_machine_passes() -> None:
    """This one runs the tests, so it must."""
    done = run("doctor")
    assert done.code == 0, done.out
    assert {line.split(":")[0].split()[1] for line in done.out.splitlines()} >= {"python", "torch", "cores", "runs"}
    assert all(line.startswith(("ok    ", "warn  ")) for line in done.out.splitlines())


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("2.7.9", "fail"), ("2.8", "ok"), ("2.13.0+cpu", "ok"), ("3.0", "fail"), ("", "fail")],
)
def test_a_version_out_of_range_fails(version: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends of the range, compared as numbers: 2.13 is above 2.8."""

    def told(name: str) -> str:
        if not version:
            raise checkup.metadata.PackageNotFoundError(name)
        return version if name == "torch" else "5.24.0"

    monkeypatch.setattr(checkup.metadata, "version", told)
    by_name = {finding.name: finding for finding in checkup.versions()}
    assert by_name["torch"].verdict == verdict
    assert by_name["transformers"].verdict == ("ok" if version else "fail")
    assert ("pip install 'torch>=2.8,<3'" in by_name["torch"].advice) == (verdict == "fail")


def test_spinning_threads_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert findings()["OMP_WAIT_POLICY"].verdict == "warn"


def test_engines_are_told_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that there are; one that gives way to exact, one that another way of it replaces, one that does not work."""
    from splitlm.core.engines import ENGINES
    from splitlm.core.errors import UsageError
    from splitlm.model.compute import choice

    assert {f"engine {name}" for name in ENGINES} <= set(findings())

    def told(asked: str) -> choice.Choice:
        if asked == "int4":
            raise UsageError("This machine cannot run the engine 'int4' (no such product)")
        if asked == "int8":
            return choice.Choice("int8", aside="there is no compiler")
        return choice.Choice("exact", "no such operator" if asked == "fast" else "")

    monkeypatch.setattr(choice, "choose", told)
    found = findings()
    assert found["engine exact"] == Finding("engine exact", "ok", "it works here")
    assert found["engine fast"].verdict == "warn" and "no such operator" in found["engine fast"].text
    assert found["engine int8"].verdict == found["engine int4"].verdict == "warn"
    assert found["engine int8"].text == "it works, with slower products (there is no compiler)"
    assert "no such product" in found["engine int4"].text


def test_an_engine_without_compiled_steps_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    from splitlm.model.compute.choice import Choice

    monkeypatch.setattr("splitlm.model.compute.choice.choose", Choice)
    monkeypatch.setattr("splitlm.model.compute.native.library.prepare", lambda: "there is no C++ compiler")
    found = {finding.name: finding for finding in checkup.engines()}
    assert (
        found["engine fast"].verdict == "ok"
        and "more slowly than it could (there is no C++ compiler)" in found["engine fast"].text
    )
    assert found["engine exact"].text == "it works here"


def test_folders_that_cannot_be_written_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below a file there is no folder; a full disk is warned of."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert findings()["cache"].verdict == "fail"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    assert findings()["cache"].verdict == "ok" and not (tmp_path / "new").exists()
    monkeypatch.setattr(checkup, "LOW_DISK", 2**60)
    assert findings()["runs"].verdict == "warn"


def test_a_model_is_looked_at(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Whole; truncated; without weights; without a tokenizer; with a cut that cannot be."""
    whole = findings(tiny("llama"), "--stages", "2")
    assert {whole[name].verdict for name in ("model", "tokenizer", "memory of stage 0", "memory of stage 1")} == {"ok"}
    folder = tmp_path / "model"
    shutil.copytree(tiny("llama"), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    assert "truncated" in findings(folder)["model"].text
    weights.unlink()
    (folder / "tokenizer.json").unlink()
    bare = findings(folder)
    assert bare["model"].verdict == bare["tokenizer"].verdict == "fail" and "weights are not" in bare["model"].text
    assert "9 stages" in findings(tiny("llama"), "--stages", "9")["model"].text


def test_a_hub_model_is_looked_at_without_its_weights(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look is not to download: that its weights are still to come is no failure."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    commit, folder = "0" * 40, tmp_path / "models--owner--name"
    shutil.copytree(tiny("llama"), folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    assert findings("owner/name")["model"].verdict == "ok"
    (folder / "snapshots" / commit / "model.safetensors").unlink()
    seen = findings("owner/name")
    assert seen["model"].verdict == "warn" and "are downloaded when it first runs" in seen["model"].text
    assert seen["tokenizer"].verdict == "ok"


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    found = findings()["cache"]
    assert found.verdict == "fail" and "XDG_CACHE_HOME" in found.text


def test_memory_is_weighed(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The imports alone need some hundred MiB; KV of a whole context comes on top."""
    monkeypatch.setattr(checkup, "_available", lambda: checkup.IMPORTS)
    assert findings(tiny("llama"))["memory of stage 0"].verdict == "fail"
    held = 2 * checkup.IMPORTS - 1
    monkeypatch.setattr(checkup, "_available", lambda: held)
    found = findings(tiny("llama"), "--stages", "2")
    assert (found["memory of stage 0"].verdict, found["memory together"].verdict) == ("ok", "warn")


def test_who_joins_weighs_its_own_part(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage is the head's, on another machine; it gives the others, and without its cut none is known."""
    monkeypatch.setattr(checkup, "joining", lambda *_: Finding("join", "ok", ""))
    words = (tiny("llama"), "--join", "localhost:1")
    places = {name for name in findings(*words, "--stages", "3") if name.startswith("memory")}
    assert places == {"memory of stage 1", "memory of stage 2"}
    alone = findings(*words)
    assert not [name for name in alone if name.startswith("memory of")]
    assert "the head's cut" in alone["memory"].text and "--stages" in alone["memory"].advice
    monkeypatch.setattr(checkup, "_available", lambda: checkup.IMPORTS)
    assert findings(*words, "--stages", "2")["memory of stage 1"].verdict == "fail"


def test_an_address_to_listen_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        where = f"127.0.0.1:{held.getsockname()[1]}"
        assert "in use" in findings("--listen", where)["listen"].text
    assert findings("--listen", where)["listen"].verdict == "ok"


@contextmanager
def head(token: str, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """A control port as a head opens it; its address."""
    from splitlm.bus.star import StarHub
    from splitlm.link import tcp
    from splitlm.node.identity import stranger
    from splitlm.wire.handshake import Identity

    ready, where = threading.Event(), []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        me = Identity(stranger("the head"), token)
        listener = await tcp.listen("127.0.0.1", 0, me, "control", expect_peer="x", tls=tls)
        hub = StarHub(listener)
        where.append(f"127.0.0.1:{listener.port}")
        ready.set()
        await over.wait()
        await hub.close()

    over = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    try:
        yield where[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def test_a_head_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, with our token; there, with another; not there."""
    with head("secret") as where:
        monkeypatch.setenv("SPLITLM_TOKEN", "secret")
        assert "the head" in findings("--join", where)["join"].text
        monkeypatch.setenv("SPLITLM_TOKEN", "guess")
        refused = findings("--join", where)["join"]
        assert refused.verdict == "fail" and "token" in refused.text
    gone = findings("--join", where, "--deadline", "0.2")["join"]
    assert gone.verdict == "fail" and "0.2 s" in gone.text


def test_a_head_to_join_over_tls(tmp_path: Path) -> None:
    """With a certificate of its authority, of another, with none, and with one that is no good."""
    ours, theirs = str(folders() / "good" / "a"), str(folders() / "other" / "a")
    with head("", good("b").listening) as where:
        found = findings("--join", where, "--tls", ours)
        assert (found["tls"].verdict, found["join"].verdict) == ("ok", "ok") and ours in found["tls"].text
        refused = findings("--join", where, "--tls", theirs)["join"]
        assert refused.verdict == "fail" and "CA" in refused.text
        plain = findings("--join", where, "--tls", "off", "--deadline", "1")
        assert plain["join"].verdict == "fail" and "tls" not in plain
        missing = findings("--join", where, "--tls", str(tmp_path))
        assert missing["tls"].verdict == "fail" and "join" not in missing
