"""The text of a generation is the same whether the event loop makes it (stop strings) or the reader does (none)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from splitlm.core.sampling import FinishReason
from splitlm.infer.request import TokenOut
from splitlm.infer.text import TextStream
from splitlm.model.text import TextCodec


def read(codec: TextCodec, tokens: Sequence[int], stop: Sequence[str], last: FinishReason) -> tuple[str, int]:
    """The text, and how many tokens it took: what the head and the reader do, in their order."""
    stream, pieces, finish = TextStream(codec, [1], stop), [], None
    taken = 0
    for index, token in enumerate(tokens):
        taken += 1
        eos = last == "eos" and index == len(tokens) - 1
        finish = "eos" if eos else stream.accept(token) if stream.accept is not None else None
        if finish is None and index == len(tokens) - 1:
            finish = last
        pieces.append(stream.text(TokenOut(token, index, finish)))
        if finish is not None:
            break
    return "".join([*pieces, stream.rest(finish)]), taken


def test_without_stop_strings_nothing_decides_and_the_reader_makes_the_text(tiny: Callable[[str], Path]) -> None:
    """The next lap does not wait for letters; they come out the same as with a stop string that never comes."""
    codec = TextCodec(tiny("llama"))
    assert TextStream(codec, [1]).accept is None
    assert TextStream(codec, [1], ["x"]).accept is not None
    tokens = codec.encode("hello you")[1:]
    assert read(codec, tokens, [], "length") == read(codec, tokens, ["never"], "length") == ("hello you", len(tokens))


def test_the_token_that_ends_by_itself_gives_no_text(tiny: Callable[[str], Path]) -> None:
    """An end-of-sequence id may have letters of its own (any id can be one); they are not part of the text."""
    codec = TextCodec(tiny("llama"))
    tokens = codec.encode("stop!")[1:]
    assert read(codec, tokens, [], "eos") == read(codec, tokens, ["never"], "eos") == ("stop", len(tokens))


def test_a_stop_string_ends_at_its_last_token(tiny: Callable[[str], Path]) -> None:
    """Without a further lap."""
    codec = TextCodec(tiny("llama"))
    tokens = codec.encode("one two three")[1:]
    assert read(codec, tokens, ["two"], "length") == ("one ", 7)
