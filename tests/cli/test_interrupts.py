"""Ctrl-C where a library would swallow it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from splitlm.cli import main
from splitlm.cli.interrupts import Interrupts, held
from splitlm.core.errors import ModelError


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Every handler as it was."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_both_signals_interrupt_and_are_remembered(number: signal.Signals) -> None:
    interrupts = Interrupts()
    interrupts.install()
    assert not interrupts.came
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)
    assert interrupts.came


def test_a_held_interrupt_comes_when_the_block_is_done() -> None:
    done, handler = [], signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), held():
        signal.raise_signal(signal.SIGINT)
        done.append("the rest of the block")
    assert done and signal.getsignal(signal.SIGINT) is handler
    with held():
        pass


def test_an_error_in_a_held_block_does_not_hide_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt), held():
        signal.raise_signal(signal.SIGINT)
        raise ImportError("a library's own words for it")


def test_threads_may_hold_too() -> None:
    """Signals belong to the main thread; elsewhere there is nothing to do."""
    seen: list[bool] = []

    def work() -> None:
        with held():
            seen.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True]


def test_an_error_after_an_interrupt_is_the_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A library that was interrupted may say that a file is damaged."""
    interrupts = Interrupts()

    def app(*_: object, **__: object) -> None:
        raise ModelError("The tokenizer cannot be loaded")

    monkeypatch.setattr(main, "app", app)
    assert main.run([], interrupts) == 4
    interrupts.came = True
    assert main.run([], interrupts) == 130
    assert capsys.readouterr().err == "splitlm: The tokenizer cannot be loaded.\nsplitlm: stopped\n"
