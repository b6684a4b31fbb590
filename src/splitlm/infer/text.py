"""Text out of tokens while they come: what the event loop decides by and what the caller reads are one stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from splitlm.core.sampling import FinishReason
from splitlm.infer.request import TokenOut
from splitlm.model.text import StopMatcher, StreamDecoder, TextCodec


class TextStream:
    """The text of one generation.

    ``accept`` is a ``Request.accept``: it runs on the event loop, and ends the generation at a stop string without a
    further lap. Without stop strings it is None, and the next lap does not wait for letters: ``text`` makes them. It
    and ``rest`` run in the thread of whoever reads the tokens, which gets a token only after ``accept`` saw it.

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
        self._decides = bool(stop)

    @property
    def accept(self) -> Callable[[int], FinishReason | None] | None:
        """What has to see every token before the next lap begins; None where the text cannot end the generation."""
        return self._accept if self._decides else None

    def _accept(self, token: int) -> FinishReason | None:
        """Take the next token; why the generation ends with it, or None."""
        text, stopped = self._matcher.push(self._decoder.push(token))
        self._texts[self._made] = text
        self._made += 1
        return "stop" if stopped else None

    def text(self, item: TokenOut) -> str:
        """What became certain with this token; empty for the one that ended it by itself."""
        if self._decides:
            return self._texts.pop(item.index, "")
        return "" if item.finish == "eos" else self._matcher.push(self._decoder.push(item.token))[0]

    def rest(self, finish: FinishReason | None) -> str:
        """What was held back until the end; nothing after a stop string."""
        if finish == "stop":
            return ""
        text, _ = self._matcher.push(self._decoder.finish())
        return text + self._matcher.finish()
