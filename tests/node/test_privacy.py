"""No token id, label, logit, prediction or loss of a single row leaves its owner: every byte of whole runs is searched.

That the search would find them is shown by planting each.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from splitlm.core import messages
from splitlm.core.errors import SplitlmError, UsageError
from splitlm.finetune import discretion
from splitlm.finetune.objective import Objective
from splitlm.finetune.party import Party
from splitlm.finetune.plane import Plane
from splitlm.finetune.recipe import OwnerData
from splitlm.link import base as link
from splitlm.wire.frame import encode
from tests.node.test_tuning import config, model_folder, rows_file, run

RUN = 4
"""Ids, labels or predictions in a row that are searched for: fewer are anywhere by chance."""
PAIR = 2
"""Logits, or losses of rows, side by side: four bytes are anywhere by chance, eight are not."""
KINDS = ("ids", "labels", "logits", "predictions", "losses")


@dataclass
class Secrets:
    """What must not leave, by kind, as the bytes and texts it could have."""

    of: dict[str, set[bytes]] = field(default_factory=lambda: {kind: set() for kind in KINDS})
    last: dict[str, torch.Tensor] = field(default_factory=dict)

    def whole(self, kind: str, numbers: list[int]) -> None:
        """Every ``RUN`` neighbours among these numbers."""
        for at in range(len(numbers) - RUN + 1):
            some = numbers[at : at + RUN]
            # Zeros at the end are also the padding of a frame behind a mask, and equal numbers a tensor of ones.
            if len(set(some)) > 1 and some[-1] and sum(map(bool, some)) > 1:
                self.of[kind] |= {struct.pack(f"<{RUN}{code}", *some) for code in "qi"}
                self.of[kind] |= {gap.join(map(str, some)).encode() for gap in (",", ", ", " ")}
                self.last[kind] = torch.tensor(some)

    def pairs(self, kind: str, values: torch.Tensor) -> None:
        """Every two neighbours among these numbers."""
        numbers = values.detach().double().tolist()
        for at in range(len(numbers) - PAIR + 1):
            some = numbers[at : at + PAIR]
            self.of[kind] |= {struct.pack(f"<{PAIR}{code}", *some) for code in "df"}
            self.last[kind] = torch.tensor(some, dtype=values.dtype)

    def single(self, kind: str, value: float) -> None:
        """A number in a header or a message: they know no other than eight bytes, or text."""
        self.of[kind] |= {struct.pack("<d", value), struct.pack(">d", value), f"{value:.15g}"[:9].encode()}


@dataclass
class Watch:
    """A run's secrets, and all that was sent."""

    secrets: Secrets = field(default_factory=Secrets)
    sent: list[bytes] = field(default_factory=list)

    def found(self) -> set[str]:
        """The kinds of secrets that were sent."""
        everything = b"\n".join(self.sent)
        return {kind for kind, all_ in self.secrets.of.items() if any(secret in everything for secret in all_)}


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Listens at the level of bytes, and knows what each owner computes."""
    seen = Watch()
    encode_message, begin, value = messages.encode, Party.begin, Objective.value

    def frame(header: Any, tensors: Any = ()) -> Any:
        parts = encode(header, tensors)
        seen.sent.append(b"".join(bytes(part) for part in parts))
        return parts

    def message(said: messages.Message) -> bytes:
        data = encode_message(said)
        seen.sent.append(data)
        return data

    def begun(self: Party, index: int, batch: Any, **more: Any) -> Any:
        for row, mask in zip(batch.ids.tolist(), batch.mask.tolist(), strict=True):
            seen.secrets.whole("ids", row[: sum(mask)])
        if batch.labels.dim() == 1:
            seen.secrets.whole("labels", batch.labels.tolist())
        return begin(self, index, batch, **more)

    def valued(self: Objective, output: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
        for logits in output.reshape(-1, output.shape[-1]):
            seen.secrets.pairs("logits", logits[:PAIR])
        guesses = output.argmax(dim=-1)
        for row in guesses.tolist() if guesses.dim() == 2 else [guesses.tolist()]:
            seen.secrets.whole("predictions", row)
        found = [value(self, output[i : i + 1], labels[i : i + 1]) for i in range(len(output))]
        sums = torch.stack([total.detach() for total, _ in found])
        means = sums / torch.tensor([items for _, items in found])
        for of in (sums, means):
            seen.secrets.pairs("losses", of)
            for one in of.tolist():
                seen.secrets.single("losses", one)
        return value(self, output, labels)

    monkeypatch.setattr(link, "encode", frame)
    monkeypatch.setattr(messages, "encode", message)
    monkeypatch.setattr(Party, "begin", begun)
    monkeypatch.setattr(Objective, "value", valued)
    yield seen


def prepared(folder: Path, family: str, **more: Any) -> Any:
    data = rows_file(folder, "classify" if family == "bert" else "text")
    model = model_folder(family, folder / "model", 0.1)
    learning = {"batch-size": 6} | more.pop("learning", {})
    return config(model, data, server={"global-round": 2} | more.pop("server", {}), learning=learning, **more)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("bert", {}),
        ("gpt2", {"fine-tune": {"name": "LoRA", "LoRA": {"r": 4, "alpha": 8}}}),
        ("bert", {"server": {"clients": [2, 2]}, "learning": {"body-sync": "window"}}),
        # One row in a window: even a window's sum would be that row's loss.
        ("bert", {"learning": {"batch-size": 1, "u-shape": {"microbatches-per-window": 1}}}),
        ("gpt2", {"learning": {"batch-size": 3, "u-shape": {"microbatches-per-window": 1}}}),
    ],
    ids=["bert", "gpt2-lora", "two-and-two", "one-row", "one-row-at-the-end"],
)
def test_nothing_of_a_row_leaves_its_owner(
    family: str, more: dict[str, Any], dtype: str, tmp_path: Path, watch: Watch
) -> None:
    done = run(prepared(tmp_path, family, **more), dtype=dtype)
    assert sum(map(len, watch.sent)) > 200_000
    ignored = {"labels"} if family == "gpt2" or "batch-size" in more.get("learning", {}) else set()
    empty = {kind for kind, all_ in watch.secrets.of.items() if not all_}
    assert empty <= ignored | ({"predictions"} if ignored else set())
    assert watch.found() == set()
    rounds = [row for kind, row in done.records if kind == "round"]
    assert all(row["loss"] is not None for row in rounds)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_planted_is_found(kind: str, tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor more in a frame, as a mistake would put it there; the neighbour refuses the frame, but it was sent."""
    send = Plane.send

    async def planted(self: Plane, who: Any, out: Any) -> None:
        secret = watch.secrets.last.get(kind)
        if secret is not None:
            out = replace(out, tensors=(*out.tensors, secret))
        await send(self, who, out)

    monkeypatch.setattr(Plane, "send", planted)
    with pytest.raises((SplitlmError, ExceptionGroup)):
        run(prepared(tmp_path, "bert"), dtype="float32")
    assert kind in watch.found()


def test_a_sum_over_one_row_would_be_found(tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discretion, "LEAST", 1)
    one = {"batch-size": 1, "u-shape": {"microbatches-per-window": 1}}
    run(prepared(tmp_path, "bert", learning=one), dtype="float32")
    assert "losses" in watch.found()


def test_a_round_of_one_row_is_reported_without_its_loss(tmp_path: Path, watch: Watch) -> None:
    made = prepared(tmp_path, "bert", server={"data-distribution": {"num-sample": 1}})
    done = run(made, dtype="float64")
    rounds = [row for kind, row in done.records if kind == "round"]
    assert [row["samples"] for row in rounds] == [1, 1]
    assert [row["loss"] for row in rounds] == [None, None]
    assert "losses" not in watch.found()


class TestReport:
    def test_sums_wait_for_a_second_sample(self) -> None:
        report = discretion.Report()
        assert report.add(1.5, 1, 1) == (0.0, 0)
        assert report.add(2.5, 1, 1) == (4.0, 2)
        assert report.add(7.0, 9, 1) == (0.0, 0)
        assert (report.loss, report.items) == (4.0, 2), "the rest would tell of one row"
        assert report.add(0.0, 0, 0) == (0.0, 0)
        assert report.add(1.0, 1, 3) == (8.0, 10)
        assert (report.loss, report.items) == (12.0, 12)


SECRET = "w7 w7 w7 confidential"


def broken_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that turn out bad when they are drawn anew."""
    round_ = OwnerData.round

    def drawn(self: OwnerData, number: int) -> Any:
        if number:
            raise UsageError(f"label 7 of {SECRET!r} is beyond 3", where="rows.jsonl, line 3")
        return round_(self, number)

    monkeypatch.setattr(OwnerData, "round", drawn)


def broken_loss(error: Exception) -> Callable[[pytest.MonkeyPatch], None]:
    """A loss that fails in the second window."""

    def broken(monkeypatch: pytest.MonkeyPatch) -> None:
        value, calls = Objective.value, [0]

        def valued(self: Objective, output: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
            calls[0] += len(output) > 1
            if calls[0] > 4:
                raise error
            return value(self, output, labels)

        monkeypatch.setattr(Objective, "value", valued)

    return broken


@pytest.mark.parametrize(
    "breaks",
    [broken_round, broken_loss(UsageError(f"label 7 of {SECRET!r}", where="rows.jsonl"))],
    ids=["rows drawn anew", "a label in a window"],
)
def test_errors_quote_no_row(
    breaks: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    watch: Watch,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = prepared(tmp_path, "bert")
    breaks(monkeypatch)
    with pytest.raises((SplitlmError, ExceptionGroup)) as caught:
        run(made)
    said = b"\n".join(watch.sent)
    assert b"Its rows or settings cannot be used" in said and b"owner 0" in said
    for word in (b"confidential", b"rows.jsonl", b"label 7"):
        assert word not in said
    assert watch.found() == set()
    texts = [caplog.text, str(caught.value), *map(str, getattr(caught.value, "exceptions", ()))]
    assert any("confidential" in text for text in texts), "the owner's own process says it all"
