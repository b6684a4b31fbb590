"""Fine-tuning as a user meets it: the two demos as real processes, and what can be wrong before and in the middle."""

from __future__ import annotations

import csv
import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from .command import ROOT, Done, all_gone, left, run, start

pytestmark = pytest.mark.usefixtures("forks")
CONFIGS = ROOT / "configs"
ROUNDS = 16
STEPS = {"u-shape": 6, "two-stage": 2}
"""Of an owner in a round: 96 rows, two microbatches of 8 for each step; or two batches of 24."""
"""Of each demo."""
DEMOS = {"u-shape": "demo-ushape.yaml", "two-stage": "demo-two-stage.yaml"}


def refused(done: Done, code: int, *says: str) -> None:
    """It ended with this code and one paragraph that says all this; no result."""
    assert done.code == code, done.err
    for text in says:
        assert text in done.paragraph, done.err
    assert done.out == ""


@dataclass
class Demo:
    """A demo that has run."""

    folder: Path
    done: Done
    summary: dict[str, Any]


@pytest.fixture(scope="module", params=list(DEMOS))
def demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """Each demo once, as its comment says to run it."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    mark = f"demo-{request.param}"
    with start("train", CONFIGS / DEMOS[request.param], "--local", "--folder", folder, "--json", mark=mark) as process:
        done = process.wait(timeout=120)
        assert done.code == 0, done.err
        assert left(mark) == []
    return Demo(folder, done, json.loads(done.out))


def test_a_demo_trains_and_sums_up(demo: Demo) -> None:
    found = demo.summary
    config = yaml.safe_load((demo.folder / "config.yaml").read_text())
    agreed = config["server"]["architecture"] == "u-shape"
    assert (found["rounds"], found["samples"], found["repeated"], found["lost"]) == (ROUNDS, ROUNDS * 2 * 96, 0, [])
    assert found["windows"] == (STEPS["u-shape"] * ROUNDS if agreed else 0)
    assert found["loss_last"] < 1.4 < found["loss_first"] < 2.5  # of six classes: ln 6 is 1.79
    assert [part["party"] for part in found["parts"]] == ["owner 0", "owner 1", "worker 0"]
    for part in found["parts"]:
        assert 0 < part["compute_s"] < found["seconds"]
        # A graph of the last stage of two lives within one step, and is never kept.
        assert 1 <= part["peak_live"] <= 4 if agreed or part["party"] != "worker 0" else part["peak_live"] == 0
    assert found["scores"].keys() >= {"valid_loss", "accuracy"}
    assert 0.3 < found["scores"]["accuracy"] <= 1, "a demo learns: chance is 1 in 6"
    lanes = found["bytes_by_lane"]
    # Hidden states of 16 samples of 64 wide floats and more, there and back.
    assert all(lanes[lane] > 100_000 for lane in ("activation", "gradient", "state"))
    sent, came = (sum(part[way]["activation"] for part in found["parts"]) for way in ("bytes_out", "bytes_in"))
    assert came == sent
    assert f"round 1 of {ROUNDS}: " in demo.done.err and f"round {ROUNDS} of {ROUNDS}: " in demo.done.err


def test_a_demo_leaves_its_settings_metrics_and_logs(demo: Demo) -> None:
    folder = demo.folder
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["learning"]["clip-grad-norm"] == 0.0  # defaults too
    assert "password" not in (folder / "config.yaml").read_text()
    versions = json.loads((folder / "versions.json").read_text())
    assert {"python", "splitlm", "torch", "transformers", "peft"} <= versions.keys()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kinds = [row["record"] for row in rows]
    assert kinds.count("round") == ROUNDS and kinds.count("party") == 3 * ROUNDS and kinds.count("owner") == 2
    windows = [row for row in rows if row["record"] == "window" and row["party"].startswith("owner")]
    assert len(windows) == ROUNDS * 2 * STEPS[config["server"]["architecture"]] and all(
        row["loss"] > 0 for row in windows
    )
    with (folder / "metrics.csv").open(newline="") as file:
        assert [row["record"] for row in csv.DictReader(file)] == kinds
    for name in ("owner-0", "owner-1", "worker-0"):
        log = (folder / f"{name}.log").read_text()
        for words in (
            "activation lane: ",
            "gradient lane: ",
            "state lane: ",
            "copies to the device 0.000 s, back 0.000 s",
        ):
            assert words in log, log
        for words in ("receive pools: ", " reuses", "most graphs kept at once: ", "waiting for neighbours"):
            assert words in log, log
        assert "Traceback" not in log
    unused = (folder / "coordinator.log").read_text()
    if config["server"]["architecture"] == "u-shape":
        assert "does not read" not in unused
    else:
        assert "does not read" not in unused or "u-shape" in unused


def test_what_a_demo_made_loads_and_knows_its_classes(demo: Demo) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    assert demo.summary["output"] == str(demo.folder / "model")
    model = AutoModelForSequenceClassification.from_pretrained(demo.folder / "model").eval()
    given = AutoTokenizer.from_pretrained(demo.folder / "model")("i feel fine", return_tensors="pt")
    with torch.no_grad():
        assert model(**given).logits.shape == (1, 6)
    assert model.config.num_hidden_layers == 4


def test_a_demo_is_exported(demo: Demo, tmp_path: Path) -> None:
    done = run("export", demo.folder, "--to", tmp_path / "out")
    assert done.code == 0 and "from_pretrained" in done.out
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        demo.folder / "model" / "model.safetensors"
    ).read_bytes()
    refused(run("export", demo.folder, "--to", tmp_path / "out", "--merge"), 2, "no adapter", "LoRA")
    refused(run("export", demo.folder, "--to", tmp_path / "out", "--merge", "--adapter"), 2, "exclude each other")
    refused(run("export", tmp_path / "nothing", "--to", tmp_path / "x"), 2, "no run here", "nothing")


def test_a_run_is_not_trained_over(demo: Demo) -> None:
    before = sorted(path.name for path in demo.folder.iterdir())
    done = run("train", CONFIGS / "demo-ushape.yaml", "--local", "--folder", demo.folder)
    refused(done, 2, "Another run lies here", str(demo.folder))
    assert sorted(path.name for path in demo.folder.iterdir()) == before


def test_the_closing_summary_in_words(tmp_path: Path) -> None:
    """In this process, since nothing of it depends on which; with one owner and a setting that is not read."""
    changes = ["server.clients=[1,1]", "server.data-distribution.num-sample=32", "learning.control-count=3"]
    changes.append("server.global-round=2")
    options = [word for change in changes for word in ("--set", change)]
    folder = tmp_path / "run"
    done = run("train", CONFIGS / "demo-ushape.yaml", "--local", "--folder", folder, *options)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("2 rounds, 4 windows, 64 samples in ")
    assert any(line.startswith("loss ") and " → " in line for line in lines)
    assert any(line.startswith("bytes ") and "activations" in line and "gradients" in line for line in lines)
    assert any("party" in line and "computing" in line and "waiting" in line for line in lines)
    assert any(line.strip().startswith("worker 0") and "%" in line for line in lines)
    assert lines[-1].strip() == f"splitlm export {folder} --to my-model"
    assert "learning.control-count" in (folder / "coordinator.log").read_text()
    assert "learning.control-count" not in done.err


def test_a_run_is_gone_on_with_by_its_folder_alone(tmp_path: Path) -> None:
    """No CONFIG, no --local: the run's own settings hold, and what it does not store is asked for."""
    changes = ["server.clients=[1,1]", "server.data-distribution.num-sample=32", "server.global-round=1"]
    options = [word for change in changes for word in ("--set", change)]
    folder = tmp_path / "run"
    assert run("train", CONFIGS / "demo-ushape.yaml", "--local", "--folder", folder, *options).code == 0
    done = run("train", "--resume", folder, "--set", "server.global-round=2", "--json")
    assert done.code == 0, done.err
    assert "round 2 of 2: " in done.err and "round 1 of 2: " not in done.err and "password" not in done.err
    assert json.loads(done.out)["samples"] == 32
    done = run("coordinator", "--resume", folder, "--deadline", "0.3")
    assert done.code == 3 and f"splitlm client {folder / 'config.yaml'} --layer-id 1 --join" in done.err, done.err
    broker = ["--set", "server.bus=rabbitmq", "--set", "rabbit.port=1", "--deadline", "0.3"]
    for verb in ("train", "coordinator"):
        done = run(verb, "--resume", folder, *broker)
        assert done.code == 3 and "warning: a run's folder does not store the broker's password" in done.err, done.err
    done = run("coordinator", "--resume", folder, *broker, "--set", "rabbit.password=secret")
    assert done.code == 3 and "password" not in done.err, done.err
    for verb in ("train", "coordinator"):
        refused(run(verb, "--resume", tmp_path / "none"), 2, "no run here", "--resume", "none")


def test_a_worker_averages_in_the_coordinators_place(tmp_path: Path) -> None:
    changes = ["server.clients=[1,2]", "server.global-round=1", "server.aggregator=worker-1"]
    changes.append("server.data-distribution.num-sample=32")
    options = [word for change in changes for word in ("--set", change)]
    folder = tmp_path / "run"
    done = run("train", CONFIGS / "demo-ushape.yaml", "--local", "--folder", folder, *options, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["samples"] == 32 and "central_accuracy" in found["scores"]
    assert Path(found["output"]).samefile(folder / "model") and (folder / "model" / "model.safetensors").is_file()
    logs = {name: (folder / f"{name}.log").read_text() for name in ("worker-0", "worker-1")}
    assert ["the model of each round is written to" in log for log in logs.values()].count(True) == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["server.global-rounds=2"], ("server.global-rounds", "nearest known key is server.global-round")),
        (["learning.batch-size=many"], ("learning.batch-size", "whole number")),
        (["learning.batch-size=0"], ("learning.batch-size", "at least 1")),
        (["server.cut-layers=3", "server.tail-blocks=1"], ("cut-layers", "tail-blocks", "no block")),
        (["server.clients=[9,1]"], ("worker-max-inflight", "9 owners")),
        (["server.architecture=two-stage", "server.clients=[1,2]"], ("server.clients", "two-stage", "[n, 1]")),
        (["server.architecture=w-shape"], ("server.architecture", "u-shape")),
        (["batch-size"], ("--set", "KEY=VALUE")),
        (["server.aggregator=owner-0"], ("server.aggregator", "owner-0", "worker-0")),
        (["server.model-path=/nonexistent/model"], ("/nonexistent/model",)),
        (['name="a\\0b"'], ("name", "holds the character")),
        (["log_path=~nobody9/x"], ("log_path", "~nobody9/x", "home folder")),
        (["privacy={noise: 1, noise: 2}"], ("--set, line 1", "'noise' stands twice")),
    ],
)
def test_settings_that_cannot_be(changes: list[str], says: tuple[str, ...], tmp_path: Path) -> None:
    options = [word for change in changes for word in ("--set", change)]
    done = run("train", CONFIGS / "demo-ushape.yaml", "--local", "--folder", tmp_path / "run", *options)
    refused(done, 4 if "model-path" in changes[0] else 2, *says)
    assert not (tmp_path / "run").exists()


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    refused(run("train", tmp_path / "none.yaml", "--local"), 2, "none.yaml", "No such file")
    (tmp_path / "bad.yaml").write_text("server: [")
    refused(run("train", tmp_path / "bad.yaml", "--local"), 2, "bad.yaml", "not YAML")
    (tmp_path / "list.yaml").write_text("- 1\n")
    refused(run("train", tmp_path / "list.yaml", "--local"), 2, "list.yaml", "mapping")
    refused(run("train", tmp_path, "--local"), 2, str(tmp_path), "directory")


def test_rows_that_cannot_be_used_end_the_run(tmp_path: Path) -> None:
    """The owner finds it, and its words reach the user without the row; nothing is left running."""
    (tmp_path / "rows.jsonl").write_text('{"text": "so secret", "label": "x"}\n')
    options = ["--set", f"server.data-path={tmp_path / 'rows.jsonl'}"]
    with start(
        "train", CONFIGS / "demo-ushape.yaml", "--local", "--folder", tmp_path / "run", *options, mark="rows"
    ) as it:
        done = it.wait()
        assert done.code in (2, 4), done.err
        assert "so secret" not in done.err + done.out
        assert all_gone("rows")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train"], ("--local", "splitlm coordinator")),
        (["client"], ("--join", "HOST:PORT")),
        (["client", "--layer_id", "2", "--compute_weight", "3", "--tensor_host", "h"], ("--join", "HOST:PORT")),
        (["client", "--layer-id", "3", "--join", "127.0.0.1:1"], ("--layer-id", "1 (owner) or 2 (worker)")),
        (["client", "--join", "nowhere"], ("--join", "'nowhere'")),
        (["client", "--join", "127.0.0.1:1", "--device", "gpu"], ("--device", "cpu, cuda or cuda:N")),
        (["client", "--frobnicate"], ("No such option",)),
        *(
            (["client", "--join", "127.0.0.1:1", f"{option}={value}"], (option, expected))
            for option, values, expected in (
                ("--compute-weight", ("nan", "-1", "0", "inf"), "a positive number"),
                ("--deadline", ("nan", "-1", "0", "inf"), "a positive number of seconds"),
                ("--tensor-port", ("-1", "65535", "65536"), "from 1 to 65534: the next one is used too"),
            )
            for value in values
        ),
        (
            ["client", "--join=127.0.0.1:1", "--set=server.aggregator=worker-0", "--tensor-port=65534"],
            ("--tensor-port", "from 1 to 65533: the next 2 are used too"),
        ),
        (["train", "--local", "--threads", "0"], ("--threads", "at least 1")),
        (["train", "--local", "--deadline", "0"], ("--deadline",)),
        (["coordinator", "--listen", "7000"], ("--listen", "HOST:PORT")),
    ],
)
def test_words_that_are_wrong(words: list[str], says: tuple[str, ...]) -> None:
    verb, *options = words
    refused(run(verb, CONFIGS / "demo-ushape.yaml", *options), 2, *says)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there() -> None:
    for name in ("cuda", "cuda:1"):
        done = run("client", CONFIGS / "demo-ushape.yaml", "--join", "127.0.0.1:1", "--device", name)
        refused(done, 2, "--device", "no CUDA device")


def test_what_gives_tokens_away_is_said_before_the_run(tmp_path: Path) -> None:
    done = run(
        "coordinator",
        CONFIGS / "demo-ushape.yaml",
        "--folder",
        tmp_path / "run",
        "--deadline",
        "0.3",
        "--set",
        "fine-tune.freeze-embeddings=False",
    )
    assert done.code == 3 and "warning: fine-tune.freeze-embeddings" in done.err
    assert "parties join with: splitlm client" in done.err
    assert "0.3 s for 2 owners and 1 worker" in done.err


@pytest.mark.parametrize("at", ["starting", "is here", "parameters", "round 1 of"])
def test_ctrl_c_at_any_time_leaves_nothing(at: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if at == "starting":
        request.getfixturevalue("interpreters")  # it imports torch
    mark = f"ctrl-c {at}"
    options = ["--folder", tmp_path / "run", "--set", "server.global-round=500"]
    with start("train", CONFIGS / "demo-ushape.yaml", "--local", *options, mark=mark) as process:
        process.read_until(at)
        process.signal(signal.SIGINT, group=True)
        done = process.wait()
        assert done.code == 130, done.err
        assert done.err.splitlines()[-1] == "splitlm: stopped" and "Traceback" not in done.err
        assert done.out == ""
        assert all_gone(mark)
    half = [path.name for path in tmp_path.rglob("*") if path.name.endswith(".part")]
    assert half == []
