"""A ring hosted by this process: its other stages are child processes here, or machines that join.

This is the Python API::

    with splitlm.Ring("smollm2-135m", stages=3) as ring:
        print(ring.generate("Once upon a time"))
        for piece in ring.stream("A fox"):
            print(piece, end="")
"""

from __future__ import annotations

import asyncio
import queue
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from splitlm.core.cut import Cut
from splitlm.core.errors import NetworkError, SplitlmError
from splitlm.core.sampling import FinishReason, Sampling
from splitlm.infer.head import Head
from splitlm.infer.request import Request, TokenOut
from splitlm.model.load import Loader, ModelFiles
from splitlm.model.source import resolve
from splitlm.model.text import StopMatcher, StreamDecoder, TextCodec
from splitlm.node.processes import StageProcess
from splitlm.node.ring import RingHost
from splitlm.node.settings import RingSettings, StageReport

T = TypeVar("T")


@dataclass
class Generation:
    """A finished generation.

    Attributes:
        text: without special tokens and stop strings.
        tokens: ids, the ending one included.
        finish: why it ended.
        prompt_tokens: number of tokens of the prompt.
        logits: one ``[vocab]`` tensor per token, where they were asked for.
    """

    text: str
    tokens: list[int]
    finish: FinishReason
    prompt_tokens: int
    logits: list[torch.Tensor] = field(default_factory=list)


class Ring:
    """One model, cut over this process and others; a context manager.

    Args:
        model: hub id, directory, ``.gguf`` file or ``smollm2-135m``.
        stages: number of nodes, this process included; 1 runs the model uncut here.
        cuts: block boundaries, such as ``(6, 11)``; None balances them.
        private: keep norm and head (and ``tail_blocks`` final blocks) here, so that no other node sees a token.
        listen: ``(host, port)`` at which other machines join; None starts the stages as processes on this machine.
        token: join secret; a random one by default where the stages are processes of this machine.
        threads: intra-op threads per node; 0 leaves torch's choice.
        prefill_chunk: prompt tokens per step.
        deadline_s: how long to wait for stages.
        trace_dir: folder for traces and logs; None keeps no trace.
        say: takes one line of progress.
        static: this node holds blocks ``[0, static)`` and the others bring places of their own.

    Raises:
        SplitlmError: from ``open``: see each class in ``splitlm.core.errors``.
    """

    def __init__(
        self,
        model: str,
        *,
        stages: int = 1,
        cuts: Sequence[int] | None = None,
        private: bool = False,
        tail_blocks: int = 0,
        family: str = "",
        loader: Loader = "shard",
        dtype: str = "auto",
        compute: str = "exact",
        threads: int = 0,
        pace_ms: float = 0.0,
        prefill_chunk: int = 128,
        listen: tuple[str, int] | None = None,
        data: tuple[str, int] = ("", 0),
        send: tuple[str, int] = ("", 0),
        static: int | None = None,
        token: str = "",
        deadline_s: float = 60.0,
        trace_dir: Path | str | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._say = say
        self._remote = listen is not None
        self._given: dict[str, Any] = {
            "model": model,
            "stages": stages,
            "cuts": tuple(cuts) if cuts is not None else None,
            "private": private,
            "tail_blocks": tail_blocks,
            "static": static,
            "family": family,
            "loader": loader,
            "dtype": dtype,
            "compute": compute,
            "threads": threads,
            "pace_ms": pace_ms,
            "prefill_chunk": prefill_chunk,
            "token": token or ("" if self._remote else secrets.token_hex(16)),
            "listen": listen or ("127.0.0.1", 0),
            "data": data,
            "send": send,
            "deadline_s": deadline_s,
            "trace_dir": Path(trace_dir) if trace_dir is not None else None,
        }
        self._logs: tempfile.TemporaryDirectory[str] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._host: RingHost | None = None
        self._served: Future[None] | None = None
        self._head: Head | None = None
        self._codec: TextCodec | None = None
        self.settings: RingSettings | None = None

    def __enter__(self) -> Ring:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Start the stages, wait until tokens may flow.

        Raises:
            SplitlmError: the model cannot be loaded, a stage did not come, an address is taken …; nothing stays behind.
        """
        folder = resolve(self._given["model"], progress=self._say)
        self._codec = TextCodec(folder)
        self.settings = RingSettings(folder=folder, **self._given)
        loop = self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="splitlm-loop", daemon=True)
        self._thread.start()
        try:
            self._host = self._call(self._make_host(self.settings))
            self._served = asyncio.run_coroutine_threadsafe(self._host.serve(), loop)
            self._head = self._call(self._started(self._host))
        except BaseException:
            self.close()
            raise

    async def _make_host(self, settings: RingSettings) -> RingHost:
        return RingHost(settings, None if self._remote else self._spawn, self._say)

    async def _started(self, host: RingHost) -> Head:
        return await asyncio.shield(host.started)

    def _call(self, work: Any) -> Any:
        """Run a coroutine on the ring's loop; Ctrl-C while waiting ends the ring."""
        if self._loop is None:
            raise NetworkError("The ring is not open", remedy="Use it in a with block")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _spawn(self, port: int, count: int) -> list[StageProcess]:
        settings = self.settings
        if settings is None:
            raise RuntimeError("no settings")
        if settings.trace_dir is not None:
            settings.trace_dir.mkdir(parents=True, exist_ok=True)
            logs = settings.trace_dir
        else:
            self._logs = tempfile.TemporaryDirectory(prefix="splitlm-")
            logs = Path(self._logs.name)
        arguments = ["--join", f"127.0.0.1:{port}", "--deadline", str(settings.deadline_s)]
        arguments += ["--trace-dir", str(logs)] if settings.trace_dir is not None else ["--no-trace"]
        environment = {"SPLITLM_TOKEN": settings.token, "OMP_WAIT_POLICY": "PASSIVE"}
        started: list[StageProcess] = []
        try:
            for i in range(1, count + 1):
                log = logs / f"stage-{i}.log"
                started.append(StageProcess([str(settings.folder), *arguments], log=log, environment=environment))
        except BaseException:
            for process in started:
                process.end()
            raise
        return started

    def close(self) -> None:
        """Stop the stages and free everything; safe to call twice."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        try:
            if self._host is not None and self._served is not None:
                loop.call_soon_threadsafe(self._host.stop.set)
                with suppress(SplitlmError):
                    self._served.result()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            if self._thread is not None:
                self._thread.join()
            loop.close()
            if self._logs is not None:
                self._logs.cleanup()

    @property
    def cut(self) -> Cut:
        """Which node holds which blocks."""
        if self._host is None or self._host.cut is None:
            raise NetworkError("The ring is not open", remedy="Use it in a with block")
        return self._host.cut

    @property
    def files(self) -> ModelFiles:
        """The model's config and index."""
        if self._host is None or self._host.files is None:
            raise NetworkError("The ring is not open", remedy="Use it in a with block")
        return self._host.files

    @property
    def codec(self) -> TextCodec:
        """The model's tokenizer."""
        if self._codec is None:
            raise NetworkError("The ring is not open", remedy="Use it in a with block")
        return self._codec

    @property
    def reports(self) -> list[StageReport]:
        """What each node held and did; complete once the ring is closed."""
        return self._host.reports if self._host is not None else []

    @property
    def stage_pids(self) -> list[int]:
        """Process ids of the stages that this ring started."""
        return self._host.stage_pids if self._host is not None else []

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        logits: bool = False,
        on_text: Callable[[str], None] | None = None,
    ) -> Generation:
        """Generate to the end. Several threads may call it at once; their sessions share the ring.

        Args:
            prompt: text, or token ids as they are.
            stop: strings that end it; they are not part of the text.
            ignore_eos: go on after an end-of-sequence token.
            logits: also return the logits of every token (they travel; for checks).
            on_text: takes each piece of text as it becomes certain.

        Raises:
            PromptError: no token, or more than the context holds.
            NetworkError: a stage was lost.
        """
        tokens: list[int] = []
        kept: list[torch.Tensor] = []
        pieces: list[str] = []
        finish: FinishReason = "length"
        ids = self._ids(prompt)
        for item, text in self._run(ids, max_new_tokens, sampling, stop, ignore_eos, logits):
            if item is not None:
                tokens.append(item.token)
                finish = item.finish or finish
                if item.logits is not None:
                    kept.append(item.logits)
            if text:
                pieces.append(text)
                if on_text is not None:
                    on_text(text)
        return Generation("".join(pieces), tokens, finish, len(ids), kept)

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> Iterator[str]:
        """Pieces of text as they become certain; leaving the loop early ends the session. See ``generate``."""
        for _, text in self._run(self._ids(prompt), max_new_tokens, sampling, stop, ignore_eos, False):
            if text:
                yield text

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        return self.codec.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _run(
        self,
        ids: list[int],
        max_new_tokens: int,
        sampling: Sampling | None,
        stop: Sequence[str],
        ignore_eos: bool,
        logits: bool,
    ) -> Iterator[tuple[TokenOut | None, str]]:
        """Tokens with the text that they make certain; a last pair without a token flushes what was held back."""
        codec, head, loop = self.codec, self._head, self._loop
        if head is None or loop is None:
            raise NetworkError("The ring is not open", remedy="Use it in a with block")
        decoder, matcher = StreamDecoder(codec, ids), StopMatcher(stop)
        eos = frozenset() if ignore_eos else codec.eos_ids
        texts: dict[int, str] = {}
        made = 0

        def accept(token: int) -> FinishReason | None:
            nonlocal made
            text, stopped = matcher.push(decoder.push(token))
            texts[made] = text
            made += 1
            return "stop" if stopped else None

        request = Request(tuple(ids), max_new_tokens, sampling or Sampling(), eos, logits=logits, accept=accept)
        out: queue.SimpleQueue[TokenOut | BaseException | None] = queue.SimpleQueue()

        async def pump() -> None:
            try:
                async for item in head.generate(request):
                    out.put(item)
                out.put(None)
            except BaseException as error:  # noqa: BLE001 - handed to the thread that iterates
                out.put(error)

        job = asyncio.run_coroutine_threadsafe(pump(), loop)
        try:
            finish: FinishReason | None = None
            while (item := out.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                finish = item.finish
                yield item, texts.pop(item.index, "")
            if finish != "stop":
                text, _ = matcher.push(decoder.finish())
                yield None, text + matcher.finish()
        finally:
            job.cancel()
