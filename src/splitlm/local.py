"""A ring hosted by this process: its other stages are child processes here, or machines that join.

This is the Python API::

    with splitlm.Ring("smollm2-135m", stages=3) as ring:
        print(ring.generate("Once upon a time"))
        for piece in ring.stream("A fox"):
            print(piece, end="")
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from splitlm.coordinator.coordinator import CTRL_TIMEOUT_S
from splitlm.core.cut import Cut
from splitlm.core.errors import SplitlmError, UsageError
from splitlm.core.sampling import FinishReason, Sampling
from splitlm.core.shifts import Shift
from splitlm.infer.generation import Generation as Generation
from splitlm.infer.head import Head
from splitlm.infer.request import Request, TokenOut, counted, seeded, stops, token_ids
from splitlm.infer.text import TextStream
from splitlm.model.load import Loader, ModelFiles
from splitlm.model.source import resolve
from splitlm.model.text import TextCodec
from splitlm.node.processes import fresh_folder, start_stages
from splitlm.node.ring import RingHost
from splitlm.node.settings import RingSettings, StageReport
from splitlm.node.thread import LoopThread, not_open
from splitlm.node.window import Boundary
from splitlm.telemetry.record import Migration


class Ring:
    """One model, cut over this process and others; a context manager.

    Args:
        model: hub id, directory, ``.gguf`` file or ``smollm2-135m``.
        stages: number of nodes, this process included; 1 runs the model uncut here.
        cuts: block boundaries, such as ``(6, 11)``; None balances them.
        private: keep norm and head (and ``tail_blocks`` final blocks) here, so that no other node sees a token.
        family: name of the model's layout, where its config does not tell.
        loader: ``shard`` reads what each node needs; ``hf`` loads all through transformers, then drops the rest.
        dtype: ``auto`` (the checkpoint's own), ``float32``, ``bfloat16`` or ``float16``.
        compute: engine (``core.engines``), or one for each stage.
        pace_ms: least milliseconds per block, for simulated devices; 0 is off.
        listen: ``(host, port)`` at which other machines join; None starts the stages as processes on this machine.
        token: join secret; a random one by default where the stages are processes of this machine.
        threads: intra-op threads per node; 0 leaves torch's choice. ``prefill_chunk``: prompt tokens per step.
        deadline_s: how long to wait for stages.
        window: laps between barriers, or 0; ``ctrl_timeout_s`` is how long one waits for a stage.
        plan: ``auto`` moves blocks where measured times say that it pays within ``horizon`` tokens.
        shifts: moves, each at the first boundary from its token on, in order; ``background`` brings blocks before it.
        trace_dir: folder for traces and logs, in place of an older ring's; None keeps none. ``say`` takes progress.
        static: this node holds blocks ``[0, static)`` and the others bring places of their own.
        data: address for the last node's link, or a free port beside ``listen``; ``send``: node 1's, if fixed.
        tls: folder with this node's certificate, as ``splitlm certs`` makes it; None leaves all links plain.

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
        compute: str | Sequence[str] = "exact",
        threads: int = 0,
        pace_ms: float | Sequence[float] = 0.0,
        prefill_chunk: int = 128,
        listen: tuple[str, int] | None = None,
        data: tuple[str, int] = ("", 0),
        send: tuple[str, int] = ("", 0),
        static: int | None = None,
        token: str = "",
        tls: Path | str | None = None,
        deadline_s: float = 60.0,
        ctrl_timeout_s: float = CTRL_TIMEOUT_S,
        window: int = 20,
        shifts: Sequence[Shift] = (),
        plan: str = "noop",
        horizon: int = 1000,
        background: bool = True,
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
            "compute": compute if isinstance(compute, str) else tuple(compute),
            "threads": threads,
            "pace_ms": tuple(pace_ms) if isinstance(pace_ms, Sequence) else pace_ms,
            "prefill_chunk": prefill_chunk,
            "token": token or ("" if self._remote else secrets.token_hex(16)),
            "listen": listen or ("127.0.0.1", 0),
            "data": data,
            "send": send,
            "tls": Path(tls) if tls is not None else None,
            "deadline_s": deadline_s,
            "ctrl_timeout_s": ctrl_timeout_s,
            "window": window,
            "shifts": tuple(shifts),
            "plan": plan,
            "horizon": horizon,
            "background": background,
            "trace_dir": Path(trace_dir) if trace_dir is not None else None,
        }
        self._lock = threading.Lock()
        self._thread: LoopThread | None = None
        self._host: RingHost | None = None
        self._served: Future[None] | None = None
        self._unclosed: weakref.finalize[..., Ring] | None = None
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
        with self._lock:
            if self._thread is not None:
                raise UsageError("The ring is open already", expected="one open for each close")
            thread = self._thread = LoopThread("splitlm-loop")
        try:
            settings = self.settings = RingSettings(folder=self.codec.directory, **self._given)
            if settings.trace_dir is not None:
                fresh_folder(settings.trace_dir)
            host = self._host = thread.call(self._make_host(settings))
            self._served = thread.submit(host.serve())
            self._unclosed = weakref.finalize(self, thread.abandon, host.stop.set, self._served)
            self._unclosed.atexit = False  # stages see themselves that this process is gone
            self._head = thread.call(self._started(host))
        except BaseException:
            self.close()
            raise

    async def _make_host(self, settings: RingSettings) -> RingHost:
        return RingHost(settings, None if self._remote else functools.partial(start_stages, settings), self._say)

    async def _started(self, host: RingHost) -> Head:
        return await asyncio.shield(host.started)

    def close(self) -> None:
        """Stop the stages and free everything; safe to call twice, and while other threads generate.

        Their generations end with a NetworkError. In a forked child it does nothing: the ring is the parent's.
        """
        with self._lock:
            thread, self._thread = self._thread, None
        if self._unclosed is not None:
            self._unclosed.detach()
        if thread is None or thread.forked:
            return
        host, served = self._host, self._served
        self._served = self._head = None
        try:
            if host is not None and served is not None:
                thread.call(self._tell_to_stop(host))
                with suppress(SplitlmError, CancelledError):
                    served.result()
        finally:
            if host is not None:
                host.kill()  # nothing is left of them by now, unless a second Ctrl-C ended the wait
            thread.close()

    async def _tell_to_stop(self, host: RingHost) -> None:
        host.stop.set()

    @property
    def error(self) -> SplitlmError | None:
        """Why the ring broke; None while it works, and after it was closed in order."""
        return self._host.broken if self._host is not None else None

    @property
    def cut(self) -> Cut:
        """Which node holds which blocks."""
        if self._host is None or self._host.cut is None:
            raise not_open()
        return self._host.cut

    @property
    def files(self) -> ModelFiles:
        """The model's config and index."""
        if self._host is None or self._host.files is None:
            raise not_open()
        return self._host.files

    @property
    def codec(self) -> TextCodec:
        """The model's tokenizer; needs no open ring.

        Raises:
            ModelError: there is no such model here, or its tokenizer is damaged.
        """
        if self._codec is None:
            self._codec = TextCodec(resolve(self._given["model"], progress=self._say))
        return self._codec

    @property
    def reports(self) -> list[StageReport]:
        """What each node held and did; complete once the ring is closed."""
        return self._host.reports if self._host is not None else []

    @property
    def engines(self) -> list[str]:
        """The engine that each node runs, by the name that it gives itself."""
        return self._host.engines if self._host is not None else []

    @property
    def stage_pids(self) -> list[int]:
        """Process ids of the stages that this ring started."""
        return self._host.stage_pids if self._host is not None else []

    @property
    def boundaries(self) -> list[Boundary]:
        """What happened between windows: how long the ring stood, and which blocks moved."""
        return self._host.boundaries if self._host is not None else []

    @property
    def migrations(self) -> list[Migration]:
        """What each side of each move gave or received; complete once the ring is closed."""
        return self._host.migrations if self._host is not None else []

    def generate(
        self,
        prompt: str | Iterable[int],
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
            prompt: text, or token ids as they are: a sequence, or an array of one dimension.
            stop: strings (or one) that end it; they are not part of the text.
            ignore_eos: go on after an end-of-sequence token.
            logits: also return the logits of every token (they travel; for checks).
            on_text: takes each piece of text as it becomes certain.

        Raises:
            PromptError: no token, more than the context holds, or something else than ids of this model.
            UsageError: a setting out of range or of another type.
            NetworkError: a stage was lost.
        """
        tokens: list[int] = []
        kept: list[torch.Tensor] = []
        pieces: list[str] = []
        finish: FinishReason = "length"
        ids = self._ids(prompt)
        chosen = seeded(sampling)
        for item, text in self._run(ids, max_new_tokens, chosen, stop, ignore_eos, logits):
            if item is not None:
                tokens.append(item.token)
                finish = item.finish or finish
                if item.logits is not None:
                    kept.append(item.logits)
            if text:
                pieces.append(text)
                if on_text is not None:
                    on_text(text)
        seed = None if chosen.greedy else chosen.seed
        return Generation("".join(pieces), tokens, finish, len(ids), kept, seed)

    def stream(
        self,
        prompt: str | Iterable[int],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> Iterator[str]:
        """Pieces of text as they become certain; leaving the loop early ends the session. See ``generate``."""
        ids = self._ids(prompt)
        for _, text in self._run(ids, max_new_tokens, seeded(sampling), stop, ignore_eos, False):
            if text:
                yield text

    def _ids(self, prompt: str | Iterable[int]) -> list[int]:
        return self.codec.encode(prompt) if isinstance(prompt, str) else token_ids(prompt)

    def _run(
        self,
        ids: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        stop: Sequence[str],
        ignore_eos: bool,
        logits: bool,
    ) -> Iterator[tuple[TokenOut | None, str]]:
        """Tokens with the text that they make certain; a last pair without a token flushes what was held back."""
        codec, head, thread = self.codec, self._head, self._thread
        if head is None or thread is None:
            raise not_open()
        eos = frozenset() if ignore_eos else codec.eos_ids
        request = Request(tuple(ids), counted(max_new_tokens), sampling, eos, logits=bool(logits))
        request.check(self.files.context, self.files.vocab)  # before the tokenizer sees ids that it cannot take
        text = TextStream(codec, ids, stops(stop))
        finish: FinishReason | None = None
        with closing(thread.iterate(head.generate(replace(request, accept=text.accept)))) as items:
            for item in items:
                finish = item.finish
                yield item, text.text(item)
        yield None, text.rest(finish)
