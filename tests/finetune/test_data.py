"""Text to examples: what is learnt of a row, and what is cut off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from splitlm.core.errors import UsageError
from splitlm.finetune.data import Rows, distribute, encode, load_rows, microbatches, prompt_of
from splitlm.finetune.objective import objective_for
from splitlm.model.text import TextCodec

CLASSES, CAUSAL, UNSHIFTED = map(objective_for, ("classification", "causal", "causal-unshifted"))
BOS, EOS = 1, 2


def tokenizer(words: list[str], template: str = "", **special: str) -> PreTrainedTokenizerFast:
    names = {word: i for i, word in enumerate(words)}
    inner = Tokenizer(models.WordLevel(names, unk_token=words[0]))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    if template:
        used = [(word, names[word]) for word in template.split() if word != "$A"]
        inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=used)
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=words[0], **special)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A directory with a tokenizer that ends each text with a special token, as BERT's does."""
    made = tokenizer(
        ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "i", "feel", "fine", "low"],
        "[CLS] $A [SEP]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )
    made.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.fixture
def codec(tiny: Callable[[str], Path]) -> TextCodec:
    """One token per character, BOS before each text, EOS known, no padding token."""
    return TextCodec(tiny("llama"))


def test_a_token_that_the_model_does_not_have_is_told(bert: Path) -> None:
    rows = Rows("rows.txt", ("i feel fine", "i feel low"), (0, 1))
    assert len(encode(rows, TextCodec(bert), CLASSES, context=512, vocab=8).examples) == 2
    with pytest.raises(UsageError, match="row 1: the tokenizer gives token id 7, and the model has 7 tokens"):
        encode(rows, TextCodec(bert), CLASSES, context=512, vocab=7)


def test_classification_keeps_the_special_token_at_the_end(bert: Path) -> None:
    rows = Rows("x", ("i feel fine", "i feel low i feel low", "zzz", "i"), (0, 2, 1, 1))
    for longest in (2, 3, 4, 5, 100):
        found = encode(rows, TextCodec(bert), CLASSES, context=512, max_length=longest)
        theirs = AutoTokenizer.from_pretrained(bert)(list(rows.texts), truncation=True, max_length=longest)
        assert [list(example.ids) for example in found.examples] == theirs["input_ids"]
        assert [(example.labels, example.weight) for example in found.examples] == [(0, 1), (2, 1), (1, 1), (1, 1)]
        assert found.rows == (0, 1, 2, 3)


def test_lengths_end_at_the_default_and_at_the_context(bert: Path, codec: TextCodec) -> None:
    def longest(objective: Any, codec: TextCodec, **options: Any) -> int:
        return max(len(example.ids) for example in encode(long, codec, objective, **options).examples)

    long = Rows("x", ("i feel " * 1000,), (0,))
    assert longest(CLASSES, TextCodec(bert), context=512) == 128
    assert longest(CLASSES, TextCodec(bert), context=64) == 64
    assert longest(CLASSES, TextCodec(bert), context=64, max_length=100) == 64
    assert longest(CAUSAL, codec, context=100_000) == 512
    assert longest(CAUSAL, codec, context=90) == 90


def test_a_text_is_learnt_whole_and_ends_with_eos(codec: TextCodec) -> None:
    (example,) = encode(Rows("x", ("abc",)), codec, CAUSAL, context=128).examples
    assert example.ids == (*codec.encode("abc"), EOS) and example.ids[0] == BOS
    assert example.labels == example.ids
    assert example.weight == 4  # a, b, c and EOS; nothing predicts BOS
    (copied,) = encode(Rows("x", ("abc",)), codec, UNSHIFTED, context=128).examples
    assert copied.weight == 5


def test_labels_are_not_in_the_way_of_a_language_model(codec: TextCodec) -> None:
    (example,) = encode(Rows("x", ("abc",), (3,)), codec, CAUSAL, context=128).examples
    assert example.labels == example.ids


def test_of_a_question_and_its_answer_the_answer_is_learnt(codec: TextCodec) -> None:
    rows = Rows("x", ("how?",), answers=("so.",))
    (example,) = encode(rows, codec, CAUSAL, context=128).examples
    assert example.ids == (*codec.encode("how?\nso."), EOS)
    prompt = len(codec.encode(prompt_of("how?")))
    assert example.labels == (-100,) * prompt + example.ids[prompt:]
    assert codec.decode(example.ids[prompt:-1]) == "so."
    assert example.weight == len("so.") + 1


def test_a_tokenizer_that_ends_texts_itself_gives_one_eos_and_an_answer(tmp_path: Path) -> None:
    words = ["<unk>", "<s>", "</s>", "how", "so", "and"]
    made = tokenizer(words, "<s> $A </s>", bos_token="<s>", eos_token="</s>")
    made.save_pretrained(tmp_path)
    codec = TextCodec(tmp_path)
    (example,) = encode(Rows("x", ("how",), answers=("so and",)), codec, CAUSAL, context=128).examples
    assert example.ids == (1, 3, 4, 5, 2)
    assert example.labels == (-100, -100, 4, 5, 2)
    (text,) = encode(Rows("x", ("how so",)), codec, CAUSAL, context=128).examples
    assert text.ids == (1, 3, 4, 2)


def test_a_real_eos_stays_a_label_though_there_is_no_padding_token(codec: TextCodec) -> None:
    rows = Rows("x", ("abc", "a"))
    (batch,) = microbatches(encode(rows, codec, CAUSAL, context=128).examples, 2, seed=1, round=0)
    short = int(batch.mask.sum(dim=1).argmin())
    assert batch.ids[short].tolist() == [BOS, *codec.encode("a")[1:], EOS, 0, 0]
    assert batch.mask[short].tolist() == [1, 1, 1, 0, 0]
    assert batch.labels[short].tolist() == [*batch.ids[short, :3].tolist(), -100, -100]
    assert batch.weight == CAUSAL.count(batch.labels) == 4 + 2


def test_weights_are_the_items_of_the_loss(codec: TextCodec) -> None:
    rows = Rows("x", tuple(f"question {i * 7}?" for i in range(9)), answers=tuple("a" * i + "b" for i in range(9)))
    for batch in microbatches(encode(rows, codec, CAUSAL, context=128).examples, 4, seed=1, round=0):
        logits = torch.zeros(*batch.ids.shape, 128)
        assert batch.weight == CAUSAL.value(logits, batch.labels)[1] == CAUSAL.metric(logits, batch.labels)[1]


def test_rows_with_nothing_to_learn_are_left_out_and_counted(
    codec: TextCodec, caplog: pytest.LogCaptureFixture
) -> None:
    rows = Rows("data.jsonl", ("x" * 50, "short"), answers=("yes", "no"))
    found = encode(rows, codec, CAUSAL, context=20)
    assert found.rows == (1,)
    assert "data.jsonl: 1 of 2 rows have nothing to learn within 20 tokens" in caplog.text
    assert found.of([0, 1]) == [found.examples[0]] and found.of([0]) == []


def test_only_the_rows_of_one_owner(codec: TextCodec, caplog: pytest.LogCaptureFixture) -> None:
    rows = Rows("x", ("a", "b", "c", "d"))
    every = encode(rows, codec, CAUSAL, context=128)
    found = encode(rows, codec, CAUSAL, context=128, only=[3, 1])
    assert found.rows == (1, 3)
    assert found.of([3, 1]) == every.of([3, 1]) == [every.examples[3], every.examples[1]]
    assert encode(rows, codec, CAUSAL, context=128, only=[]).examples == ()
    assert caplog.text == ""


def test_classification_without_labels(bert: Path) -> None:
    with pytest.raises(UsageError, match=r"rows\.txt: the objective 'classification' needs a class.*text and label"):
        encode(Rows("rows.txt", ("i feel",)), TextCodec(bert), CLASSES, context=512)


def test_a_label_beyond_the_models_classes(bert: Path) -> None:
    rows = Rows("rows.csv", ("i", "feel", "fine"), (0, 2, 1))
    assert len(encode(rows, TextCodec(bert), CLASSES, context=512, num_labels=3).examples) == 3
    with pytest.raises(UsageError, match=r"rows\.csv, row 1: label 2, and the model has 2 classes.*from 0 to 1"):
        encode(rows, TextCodec(bert), CLASSES, context=512, num_labels=2)


@pytest.mark.parametrize("options", [{"max_length": 1}, {"max_length": -5}, {"context": 1}])
def test_a_length_that_holds_nothing(codec: TextCodec, options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="2 or more"):
        encode(Rows("x", ("abc",)), codec, CAUSAL, **{"context": 128, **options})


def test_text_that_is_not_unicode_names_its_row(codec: TextCodec) -> None:
    with pytest.raises(UsageError, match="x, row 1: this text cannot be tokenised: character 1"):
        encode(Rows("x", ("fine", "a\ud800")), codec, CAUSAL, context=128)


def test_real_rows_all_the_way(shared: Path, stories: Path) -> None:
    rows = load_rows("GSM8K", "test", shared / "data")
    codec = TextCodec(stories)
    shares = distribute(rows.groups, 2, non_iid=False, num_sample=30, num_label=None, alpha=1.0, seed=1)
    found = encode(rows, codec, CAUSAL, context=512, only=[row for share in shares for row in share])
    for share in shares:
        batches = microbatches(found.of(share), 4, seed=1, round=0)
        assert sum(batch.samples for batch in batches) == sum(row in found.rows for row in share)
        assert all(0 < batch.weight < int(batch.mask.sum()) for batch in batches)
    example = found.examples[0]
    learnt = [token for token in example.labels if token != -100] if isinstance(example.labels, tuple) else []
    assert rows.answers[found.rows[0]].startswith(codec.decode(learnt)[:10].lstrip())
