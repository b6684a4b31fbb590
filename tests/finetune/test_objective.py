"""Losses against those of transformers, and the table that holds them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

import splitlm
from splitlm.core.errors import UsageError
from splitlm.finetune.objective import Objective, default_objectives, objective_for, register_objective
from splitlm.model.family import FAMILIES

CAUSAL, CLASSES = objective_for("causal"), objective_for("classification")
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0]])


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(1, 32, MASK.shape, generator=torch.Generator().manual_seed(seed)) * MASK


@pytest.fixture
def bert() -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_labels=4
    )
    torch.manual_seed(1)
    return BertForSequenceClassification(config).double().eval()


@pytest.fixture
def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
    )
    torch.manual_seed(2)
    return LlamaForCausalLM(config).double().eval()


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    wanted = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True, materialize_grads=True))


def same(model: torch.nn.Module, ours: torch.Tensor, theirs: torch.Tensor, within: float) -> None:
    assert ours.dtype == torch.float64
    assert abs(ours - theirs).item() <= within
    pairs = list(zip(gradients(model, ours), gradients(model, theirs), strict=True))
    assert max((a - b).abs().max().item() for a, b in pairs) <= within
    assert max(a.abs().max().item() for a, _ in pairs) > 1e-3, "gradients of zero agree with anything"


def test_classification_is_the_loss_of_transformers(bert: BertForSequenceClassification) -> None:
    ids, labels = tokens(3), torch.tensor([3, 0, 2])
    output = bert(ids, attention_mask=MASK, labels=labels)
    total, items = CLASSES.value(output.logits, labels)
    assert items == 3
    same(bert, total / items, output.loss, 1e-12)


def test_a_causal_loss_is_that_of_transformers(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers casts the logits to float32 first; without that cast, both are to agree to the last digits.
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)
    ids = tokens(4)
    labels = ids.masked_fill(MASK == 0, -100)
    labels[0, :3] = -100  # a prompt
    output = llama(ids, attention_mask=MASK, labels=labels)
    total, items = CAUSAL.value(output.logits, labels)
    assert items == 4 + 3 + 1
    same(llama, total / items, output.loss, 1e-12)


def test_what_is_padded_does_not_matter(llama: LlamaForCausalLM) -> None:
    labels = tokens(4).masked_fill(MASK == 0, -100)
    batch = CAUSAL.value(llama(tokens(4), attention_mask=MASK).logits, labels)
    alone = [
        CAUSAL.value(llama(tokens(4)[i : i + 1, :n]).logits, labels[i : i + 1, :n]) for i, n in enumerate((7, 4, 2))
    ]
    assert batch[1] == sum(items for _, items in alone) == 6 + 3 + 1
    assert abs(batch[0] - sum(total for total, _ in alone)).item() < 1e-10


def test_unshifted_is_another_loss_and_nobodys_default(llama: LlamaForCausalLM) -> None:
    unshifted = objective_for("causal-unshifted")
    labels = tokens(4).masked_fill(MASK == 0, -100)
    logits = llama(tokens(4), attention_mask=MASK).logits
    total, items = unshifted.value(logits, labels)
    assert items == int(MASK.sum()) == CAUSAL.value(logits, labels)[1] + 3
    assert torch.equal(total, functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum"))
    assert "causal-unshifted" not in default_objectives().families.values()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_types_are_summed_in_float32(kind: torch.dtype) -> None:
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(1)).to(kind).requires_grad_()
    labels = torch.arange(64) % 50
    total, _ = CLASSES.value(logits, labels)
    assert total.dtype == torch.float32
    assert torch.equal(total, functional.cross_entropy(logits.detach().float(), labels, reduction="sum"))
    total.backward()
    assert logits.grad is not None and logits.grad.dtype == kind


def test_a_batch_without_an_item_gives_a_zero_and_no_nan() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    labels = torch.tensor([[7, -100, -100], [-100] * 3])  # nothing predicts the first token
    total, items = CAUSAL.value(logits, labels)
    total.backward()
    assert (total.item(), items) == (0.0, 0)
    assert logits.grad is not None and not logits.grad.any()
    assert CAUSAL.metric(logits, labels) == (0.0, 0)


def test_an_own_loss_is_not_asked_for_the_mean_of_nothing() -> None:
    own = dataclasses.replace(CAUSAL, loss=lambda output, labels: output[labels != -100].mean())
    total, items = own.value(torch.ones(1, 2, 5), torch.tensor([[3, -100]]))
    assert (total.item(), items) == (0.0, 0)


def test_one_token_predicts_nothing() -> None:
    assert CAUSAL.value(torch.randn(2, 1, 5), torch.tensor([[1], [2]]))[1] == 0


def test_the_metric_counts_what_the_largest_logit_gets_right() -> None:
    best = torch.eye(6, dtype=torch.float64)
    assert CLASSES.metric(best[[1, 2, 3]], torch.tensor([1, 2, 4])) == (2.0, 3)
    # Position 0 predicts 2 (right), 1 predicts 3 (wrong); what is last, or ignored, is not counted.
    assert CAUSAL.metric(best[[2, 3, 5, 5]][None], torch.tensor([[2, 2, 4, -100]])) == (1.0, 2)
    assert CAUSAL.count(torch.tensor([[2, 2, 4, -100]])) == 2


@pytest.mark.parametrize(
    ("objective", "output", "labels"),
    [
        (CLASSES, (3, 4), torch.tensor([0, 1])),
        (CLASSES, (2, 4), torch.tensor([0.0, 1.0])),
        (CLASSES, (2, 4), torch.tensor([[0], [1]])),
        (CLASSES, (2, 3, 4), torch.tensor([0, 1])),
        (CLASSES, (2, 4), torch.tensor([0, 4])),
        (CLASSES, (2, 4), torch.tensor([0, -1])),
        (CAUSAL, (2, 3, 4), torch.tensor([0, 1])),
        (CAUSAL, (2, 3, 4), torch.tensor([[0, 1], [1, 2]])),
        (CAUSAL, (1, 3, 4), torch.tensor([[0, 1, 4]])),
        (CAUSAL, (1, 3), torch.tensor([[0, 1, 2]])),
    ],
)
def test_labels_that_do_not_fit_are_refused(
    objective: Objective, output: tuple[int, ...], labels: torch.Tensor
) -> None:
    with pytest.raises(UsageError, match=objective.name):
        objective.value(torch.zeros(output), labels)


def test_the_message_of_a_label_out_of_range() -> None:
    with pytest.raises(UsageError, match=r"label 7 for 4 classes.*from 0 to 3"):
        CLASSES.value(torch.zeros(2, 4), torch.tensor([0, 7]))


def test_every_family_has_an_objective() -> None:
    wanted = {"causal": "causal", "classify": "classification"}
    assert {f.name: objective_for(f.name).name for f in FAMILIES} == {f.name: wanted[f.task] for f in FAMILIES}
    assert objective_for("bert").name == objective_for("classify").name == "classification"
    assert objective_for("llama").shift_labels and objective_for("gpt2").shift_labels


def test_an_unknown_objective_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no objective for 'casual'.*causal-unshifted.*Did you mean causal\."):
        objective_for("casual")


def mean_square(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return ((output - labels) ** 2).mean()


SQUARE = Objective(needs_mask=False, token_loss=False, shift_labels=False, label_key="label", loss=mean_square)


def test_registering_returns_a_larger_table_and_changes_none() -> None:
    before = default_objectives()
    after = before.register("square", SQUARE, families=("bert", "mine"))
    assert after.find("square").name == after.find("bert").name == after.find("mine").name == "square"
    assert before.find("bert").name == objective_for("bert").name == "classification"
    with pytest.raises(UsageError, match="square"):
        objective_for("square", before)
    assert after.find("causal") == CAUSAL
    with pytest.raises(TypeError):
        after.entries["x"] = SQUARE  # type: ignore[index]


def test_the_public_name() -> None:
    assert splitlm.register_objective is register_objective
    first = splitlm.register_objective("square", SQUARE)
    second = splitlm.register_objective("other", SQUARE, families=("square-model",), objectives=first)
    assert objective_for("square-model", second).name == "other"
    assert objective_for("square", second) == dataclasses.replace(SQUARE, name="square")


@pytest.mark.parametrize(
    ("name", "families"), [("", ()), ("causal", ()), ("llama", ()), ("square", ("causal",))], ids=str
)
def test_names_that_would_hide_another_are_refused(name: str, families: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="register_objective"):
        register_objective(name, SQUARE, families=families)


def test_an_entry_may_be_named_like_its_family() -> None:
    assert register_objective("mine", SQUARE, families=("mine",)).find("mine").name == "mine"


def test_an_own_loss_is_a_mean_and_becomes_a_sum() -> None:
    output = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64, requires_grad=True)
    total, items = SQUARE.value(output, torch.tensor([1, 1, 2]))
    assert (total.item(), items) == (10.0, 3)
    total.backward()
    assert output.grad is not None and output.grad.tolist() == [0.0, 2.0, 6.0]


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 2, 4), (2, 4)], ids=str)
def test_an_own_output_that_is_no_logits_has_no_metric(shape: tuple[int, ...]) -> None:
    labels = torch.tensor([0, 1, 2])
    assert SQUARE.metric(torch.zeros(shape), labels) == (0.0, 0)
    assert SQUARE.metric(torch.zeros(3, 4), labels) == (1.0, 3)
    own = dataclasses.replace(CAUSAL, loss=mean_square)
    assert own.metric(torch.zeros(1, 4), torch.tensor([[1, 0, 2, 3]])) == (0.0, 0)
    assert own.metric(torch.zeros(1, 4, 5), torch.tensor([[1, 0, 2, 3]])) == (1.0, 3)


def test_an_own_loss_gets_shifted_labels_and_float32() -> None:
    seen: list[tuple[torch.dtype, list[list[int]]]] = []

    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append((output.dtype, labels.tolist()))
        return output.mean()

    dataclasses.replace(CAUSAL, loss=loss).value(torch.ones(1, 3, 4).bfloat16(), torch.tensor([[5, 6, 7]]))
    assert seen == [(torch.float32, [[6, 7, -100]])]


def test_an_own_loss_that_is_no_scalar_is_refused() -> None:
    wrong = dataclasses.replace(SQUARE, name="wrong", loss=lambda output, labels: output - labels)
    with pytest.raises(UsageError, match=r"'wrong' has shape \(2,\)"):
        wrong.value(torch.zeros(2), torch.tensor([0, 1]))


def test_whole_samples_cannot_be_shifted() -> None:
    with pytest.raises(UsageError, match="cannot be shifted"):
        Objective(needs_mask=True, token_loss=False, shift_labels=True, label_key="label")


def test_run_calls_the_model_as_the_entry_says() -> None:
    ids, mask = torch.tensor([[1, 2]]), torch.tensor([[1, 0]])
    assert torch.equal(CLASSES.run(lambda i, m: i * m, ids, mask), ids * mask)
    assert torch.equal(SQUARE.run(lambda i: i + 1, ids, mask), ids + 1)
    own = dataclasses.replace(SQUARE, forward=lambda model, inputs, mask: model(inputs) * mask)
    assert torch.equal(own.run(lambda i: i + 1, ids, mask), torch.tensor([[2, 0]]))
