"""Text to token ids and back: the tokenizer's border, streaming detokenizer, stop strings, the tokenizer's hash."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from splitlm.core.errors import ModelError, ModelMissingError, PromptError, UsageError

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""Files of which a model directory has one at least, or no tokenizer."""
_SETTINGS = ("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json")
_FILES = (*VOCABULARIES, "merges.txt", "chat_template.jinja", "chat_template.json", *_SETTINGS)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class TextCodec:
    """The tokenizer of one model directory. Reads local files only and runs no code of theirs.

    Raises:
        ModelMissingError: the directory has no tokenizer.
        ModelError: a tokenizer or config file is damaged.
    """

    def __init__(self, directory: Path) -> None:
        _need_tokenizer(directory)
        self.directory = directory
        generation, config = (_read_json(directory / name) for name in ("generation_config.json", "config.json"))
        self._tokenizer = _load_tokenizer(directory)
        self._silent = {i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        self.eos_ids: frozenset[int] = frozenset(
            i
            for value, where in (
                (self._tokenizer.eos_token_id, "tokenizer_config.json"),
                (generation.get("eos_token_id"), "generation_config.json"),
                (config.get("eos_token_id"), "config.json"),
            )
            for i in _ids(value, where, directory)
        )
        """Ids that end a generation: the union of the tokenizer's and of both configs'."""
        bos = [self._tokenizer.bos_token_id, generation.get("bos_token_id"), config.get("bos_token_id")]
        self.bos_id: int | None = next((i for value in bos for i in _ids(value, "bos_token_id", directory)), None)
        """The id that begins a text, if the model has one."""

    @property
    def has_chat_template(self) -> bool:
        """Whether ``encode_chat`` can work."""
        return bool(self._tokenizer.chat_template)

    def encode(self, prompt: str) -> list[int]:
        """The prompt's ids, with the special tokens that the tokenizer adds by itself; white space is kept as it is.

        A prompt without any token gives ``[bos_id]``.

        Raises:
            PromptError: no token at all and no BOS, or text that is not Unicode.
        """
        ids = self._encode(prompt)
        if not ids and self.bos_id is None:
            raise PromptError(
                "a prompt that gives no token at all",
                where="--prompt",
                expected="some text (a model with BOS accepts an empty one)",
            )
        return ids or [self.bos_id or 0]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a conversation (``role`` and ``content`` each), up to where the assistant's answer begins.

        Raises:
            PromptError: the model has no chat template, the template refuses the messages, or they give no token.
        """
        if not self.has_chat_template:
            raise PromptError(
                "this model has no chat template",
                where=str(self.directory),
                expected="chat_template.jinja, or chat_template in tokenizer_config.json",
                remedy="Give a plain prompt, or use an instruction-tuned model",
            )
        from jinja2.exceptions import TemplateError

        for index, message in enumerate(messages):
            for key in ("role", "content"):
                if not isinstance(message.get(key), str):
                    raise PromptError(
                        f"{key} is {message.get(key)!r}", where=f"messages[{index}].{key}", expected="a string"
                    )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, ValueError, TypeError, IndexError) as error:
            raise PromptError(
                f"the chat template refuses these messages: {error}",
                where=str(self.directory),
                expected="roles in the order that the model was trained on (system, user, assistant, user, ...)",
            ) from error
        ids = self._encode(text, add_special_tokens=False)
        if not ids:
            raise PromptError("a conversation that gives no token at all", where="messages", expected="some text")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, for display: special tokens, and ids that the tokenizer does not know, give nothing."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def is_silent(self, token: int) -> bool:
        """Whether ``decode`` leaves the id out."""
        return token in self._silent or self._tokenizer.convert_ids_to_tokens(token) is None

    def is_byte(self, token: int) -> bool:
        """Whether the token is one byte of a character outside the vocabulary (``<0xF0>``: byte fallback)."""
        return bool(self.bytes_of([token]))

    def bytes_of(self, tokens: Sequence[int]) -> bytes:
        """The bytes of those tokens that are one byte each."""
        names = (self._tokenizer.convert_ids_to_tokens(token) or "" for token in tokens)
        return bytes(int(match[1], 16) for name in names if (match := _BYTE_TOKEN.fullmatch(name)))

    def spells(self, ids: Sequence[int]) -> bool:
        """Whether the ids are what ``encode`` makes of their own text: then all of its characters are complete."""
        return self._encode(self.decode(ids)) == list(ids)

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"character {error.start} is not Unicode text", where="--prompt", expected="valid UTF-8"
            ) from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return ids


class StreamDecoder:
    """Turns ids into text as they come. All it returned, joined, is ``codec.decode`` of all the ids.

    It re-decodes a short window of the last tokens, not the whole text, and returns what no later token can change.
    Held back are a character whose bytes are not complete, and a run of byte-fallback tokens until the run ends:
    one wrong byte turns the whole run into U+FFFD.

    Args:
        codec: the tokenizer.
        prompt: ids before the first pushed one, whose text goes on: the first word keeps its space. It may end within
            a character: what completes that brings it whole, and bytes that stay broken are the prompt's.
    """

    _ANCHOR = 4
    """Tokens kept before the new ones. A token has a byte at least, so an incomplete character lies within three."""
    _WINDOW = 16
    """Longer windows are cut back to the anchor."""

    def __init__(self, codec: TextCodec, prompt: Sequence[int] = ()) -> None:
        self._codec = codec
        self._window: list[int] = []
        self._open: list[int] = []  # the window's part of the prompt, while its last character may still change
        self._returned = 0  # characters of the window's text
        for token in reversed(prompt):
            # A run of bytes must be whole, or its text would be another one.
            if len(self._window) >= self._ANCHOR and not codec.is_byte(self._window[0]):
                break
            if not codec.is_silent(token):
                self._window.insert(0, token)
        if self._window:
            text = codec.decode(self._window)
            # A U+FFFD at the end of a prompt that spells its text was written there: it is no incomplete character.
            written = text.endswith(_UNKNOWN) and codec.spells(prompt)
            self._returned = len(text if written else self._certain(text))
            if codec.is_byte(self._window[-1]) or (text.endswith(_UNKNOWN) and not written):
                self._open = list(self._window)

    def push(self, token: int) -> str:
        """The text that became certain with this token; often the token's own, sometimes empty."""
        if self._codec.is_silent(token):
            return ""
        self._window.append(token)
        if self._codec.is_byte(token):
            return ""
        text = self._codec.decode(self._window)
        certain = self._certain(text)
        if self._open:
            self._settle(certain)
        new = certain[self._returned :]
        self._returned = len(certain)
        if len(self._window) > self._WINDOW:
            self._cut_back()
        return new

    def finish(self) -> str:
        """What was held back. The stream ends here: a second call gives an empty text."""
        text = self._codec.decode(self._window)
        if self._open:
            self._settle(text)
        new = text[self._returned :]
        self._returned = len(text)
        return new

    def _settle(self, text: str) -> None:
        """Now that the text goes on: how much of it is the prompt's, whose last character may have been incomplete."""
        codec, prompt, window = self._codec, self._open, self._window
        begin = next((i for i in range(len(prompt), 0, -1) if not codec.is_byte(prompt[i - 1])), 0)
        if begin == len(prompt):  # one U+FFFD for all that is missing
            if text[self._returned :] == "":
                return
            self._returned += text[self._returned] == _UNKNOWN
        else:
            end = next((i for i in range(begin, len(window)) if not codec.is_byte(window[i])), None)
            try:
                codec.bytes_of(window[begin:end]).decode()
                begin += len(codec.bytes_of(prompt[begin:]).decode(errors="ignore").encode())
                self._returned = len(codec.decode(prompt[:begin]))
            except UnicodeDecodeError:  # then every byte of the run shows as one U+FFFD
                self._returned = len(codec.decode(prompt[:begin])) + len(prompt) - begin
        self._open = []

    @staticmethod
    def _certain(text: str) -> str:
        # An incomplete character shows as one U+FFFD at the end; those before it are final.
        return text.removesuffix(_UNKNOWN)

    def _cut_back(self) -> None:
        anchor = self._window[-self._ANCHOR :]
        text = self._codec.decode(anchor)
        # Decoders that strip a space at a text's start must find it in the anchor, not in what comes after.
        if text:
            self._window, self._returned = anchor, len(self._certain(text))


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces, however the pieces fall.

    First is the one that is complete first; of several that end together, the longest.

    Raises:
        UsageError: a stop string is empty.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        stop = (stop,) if isinstance(stop, str) else stop  # a string is a sequence of strings, but nobody means that
        if any(not s for s in stop):
            raise UsageError("a stop string is empty", where="--stop", expected="one character at least")
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=1)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """The text to show, and whether a stop string was reached (it and all after it is never shown)."""
        if self._stopped:
            return "", True
        text = self._held + text
        found = [(start + len(s), start) for s in self._stop if (start := text.find(s)) >= 0]
        if found:
            self._held, self._stopped = "", True
            return text[: min(found)[1]], True
        keep = next(
            (n for n in range(min(self._longest - 1, len(text)), 0, -1) if self._may_begin(text[len(text) - n :])), 0
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """The text held back because it might have begun a stop string."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, tail: str) -> bool:
        return any(s.startswith(tail) for s in self._stop)


def tokenizer_hash(directory: Path) -> str:
    """SHA-256 over the tokenizer's files, names included: two nodes with the same hash make the same ids.

    Raises:
        ModelMissingError: the directory has none of them.
        ModelError: one cannot be read.
    """
    _need_tokenizer(directory)
    digest = hashlib.sha256()
    found = [directory / name for name in sorted(_FILES) if (directory / name).is_file()]
    for path in found:
        content = _read(path)
        digest.update(f"{path.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _need_tokenizer(directory: Path) -> None:
    if not any((directory / name).is_file() for name in VOCABULARIES):
        raise ModelMissingError(
            "there is no tokenizer here",
            where=str(directory),
            expected=f"one of {', '.join(VOCABULARIES)}",
            remedy="Copy it from the model's original directory",
        )


def _load_tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain Exception for a damaged tokenizer.json
        from splitlm.model.config import hash_of_folder

        hash_of_folder(directory)  # the tokenizer's class reads config.json too: if that is wrong, it is what to name
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"the tokenizer cannot be loaded ({type(error).__name__}: {reason})",
            where=str(directory),
            expected="the tokenizer files that the model was published with",
            remedy="Copy tokenizer.json and tokenizer_config.json again",
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read(path))
    except ValueError as error:
        raise ModelError(f"not JSON: {error}", where=str(path), expected="a JSON object") from error
    if not isinstance(content, dict):
        raise ModelError(f"a JSON {type(content).__name__}", where=str(path), expected="a JSON object")
    return content


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(
            f"the file cannot be read ({error.strerror})", where=str(path), expected="a file that this user may read"
        ) from error


def _ids(value: object, where: str, directory: Path) -> list[int]:
    values: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and i >= 0 for i in values):
        raise ModelError(
            f"a special token id is {value!r}", where=f"{directory / where}", expected="a token id or a list of them"
        )
    return values
