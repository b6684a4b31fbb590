"""What all tests share: one thread, no network, real models where they are, and tiny ones everywhere."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.bus.server import Broker
    from tests.forks import Mother

# Before torch is imported, and inherited by every process a test starts.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("SPLITLM_TEST_GPUS", "")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """A verb that runs in this process sets up its log; the next test's is as it was."""
    logger = logging.getLogger("splitlm")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


def _shared(*parts: str) -> Path:
    path = ROOT.parent.joinpath("shared", *parts)
    if not path.exists():
        pytest.skip(f"{Path('..', 'shared', *parts)} is absent")
    return path


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of real models and data beside the repository; skips where it is absent."""
    return _shared()


@pytest.fixture(scope="session")
def stories() -> Path:
    """stories260K: a trained Llama of 260 thousand parameters."""
    _shared("models", "stories260K", "model.safetensors")
    return _shared("models", "stories260K")


@pytest.fixture(scope="session")
def tarot() -> Path:
    """gpt2-tarot-929k: a trained GPT-2 of 929 thousand parameters."""
    _shared("models", "gpt2-tarot-929k", "model.safetensors")
    return _shared("models", "gpt2-tarot-929k")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``tiny(family)``: the folder of a small model of that family (``tests.tiny.FAMILIES``), built once per run."""
    from tests.tiny import build

    built: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in built:
            built[family] = build(family, tmp_path_factory.mktemp(f"tiny-{family}"))
        return built[family]

    return get


@pytest.fixture(scope="session")
def _mother() -> Iterator[Mother | None]:
    """Whom the processes of ``forks`` are forked from; None where they are not."""
    from tests.forks import SPAWN, mother

    if SPAWN or sys.platform != "linux":
        yield None
        return
    with mother() as made:
        yield made


@pytest.fixture(scope="module")
def forks(_mother: Mother | None) -> Iterator[None]:
    """Processes that tests of this module start begin where the imports of torch and transformers end."""
    from tests.forks import popen

    with pytest.MonkeyPatch.context() as patch:
        if _mother is not None:
            patch.setattr(subprocess, "Popen", popen(_mother))
        yield


@pytest.fixture
def interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test of a module with ``forks``: its processes begin with Python, and take as long as that takes."""
    from tests.forks import REAL

    monkeypatch.setattr(subprocess, "Popen", REAL)


@pytest.fixture(scope="session")
def rabbit() -> Iterator[Broker]:
    """One private broker for all tests, since it takes some ten seconds to start; skips where there is no RabbitMQ."""
    from tests.bus.server import SERVER, Broker
    from tests.link.certificates import folders

    if not SERVER.exists():
        pytest.skip("rabbitmq-server is not installed")
    broker = Broker(folders() / "good" / "b")
    try:
        broker.start()
        yield broker
    finally:
        broker.remove()


@pytest.fixture(autouse=True)
def default_type() -> Iterator[None]:
    """torch's default element type is the whole process's: no test leaves another one to the next."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and (left := torch.get_default_dtype()) is not torch.float32:
        torch.set_default_dtype(torch.float32)
        pytest.fail(f"torch's default element type was left at {left}")
