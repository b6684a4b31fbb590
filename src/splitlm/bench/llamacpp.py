"""llama.cpp as an arm, where llama-cpp-python is installed: what one would run instead of us on one machine."""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from splitlm.bench.comparison import PROMPT_TOKENS

MODULE = "llama_cpp"
FORMATS = {"F16": "LLAMA_FTYPE_MOSTLY_F16", "Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0"}
"""What a model is measured in, and llama.cpp's name for it."""


def missing(gguf: str) -> str:
    """Why it cannot be measured here; "" where it can.

    Args:
        gguf: the model as a GGUF file, "" for none.
    """
    if importlib.util.find_spec(MODULE) is None:
        return "llama-cpp-python is not installed"
    return "" if gguf else "the model did not come as a GGUF file"


class LlamaWork:
    """A model in llama.cpp, written anew in one of ``FORMATS``, with one thread.

    Args:
        gguf: the model's file, in any format.
        form: key of ``FORMATS``.
        tokens: new tokens of a turn, at most.
    """

    def __init__(self, *, gguf: str, form: str, tokens: int) -> None:
        self._module: Any = importlib.import_module(MODULE)
        with tempfile.TemporaryDirectory(prefix="splitlm-llama-") as folder:
            path = Path(folder) / f"{form}.gguf"
            self._write(Path(gguf), path, form)
            # Read, not mapped: the file goes away, and pages that are still to come would count as computing.
            self._model: Any = self._module.Llama(
                str(path),
                n_ctx=PROMPT_TOKENS + tokens + 1,
                n_threads=1,
                n_threads_batch=1,
                use_mmap=False,
                verbose=False,
            )
        self.told: dict[str, Any] = {}

    def _write(self, source: Path, target: Path, form: str) -> None:
        how = self._module.llama_model_quantize_default_params()
        how.ftype = getattr(self._module, FORMATS[form])
        how.allow_requantize = True
        how.nthread = 1
        if self._module.llama_model_quantize(str(source).encode(), str(target).encode(), how):
            raise RuntimeError(f"llama.cpp cannot write {source} as {form}")

    def run(self, *, tokens: int) -> dict[str, Any]:
        """Generate once, greedily."""
        prompt = [3 + i for i in range(PROMPT_TOKENS)]
        self._model.reset()
        begin = time.perf_counter()
        made = sum(1 for _ in islice(self._model.generate(prompt, temp=0.0), tokens))
        return {"tokens": made, "seconds": time.perf_counter() - begin}

    def close(self) -> None:
        """Free it."""
        self._model.close()
