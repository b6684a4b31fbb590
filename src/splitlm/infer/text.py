"""Text out of tokens while they come: what the event loop decides by and what the caller reads are one stream."""

from __future__ import annotations

from collections.abc import Sequence

from splitlm.core.sampling import FinishReason
from splitlm.infer.request import TokenOut
from splitlm.model.text import StopMatcher, StreamDecoder, TextCodec


class TextStream:
    """The text of one generation.

    ``accept`` is a ``Request.accept``: it runs on the event loop, and ends the generation at a stop string without a
    further lap. ``text`` and ``rest`` run in the thread of whoever reads the tokens, which gets a token only after its
    text is complete.

    Args:
        codec: the model's tokenizer.
        prompt: token ids before the first one.
        stop: strings that end it; they are not part of the text.
    """

    def __init__(self, codec: TextCodec, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._decoder = StreamDecoder(codec, list(prompt))
        self._matcher = StopMatcher(stop)
        self._texts: dict[int, str] = {}
        self._made = 0

    def accept(self, token: int) -> FinishReason | None:
        """Take the next token; why the generation ends with it, or None."""
        text, stopped = self._matcher.push(self._decoder.push(token))
        self._texts[self._made] = text
        self._made += 1
        return "stop" if stopped else None

    def text(self, item: TokenOut) -> str:
        """What became certain with this token; empty for the one that ended it by itself."""
        return self._texts.pop(item.index, "")

    def rest(self, finish: FinishReason | None) -> str:
        """What was held back until the end; nothing after a stop string."""
        if finish == "stop":
            return ""
        text, _ = self._matcher.push(self._decoder.finish())
        return text + self._matcher.finish()
