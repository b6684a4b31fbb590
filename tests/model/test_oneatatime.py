"""Models that several threads build at once leave the process as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch

from splitlm.core.cut import make_cut
from splitlm.model.load import ModelFiles
from splitlm.model.stage import build_stages


def test_threads_that_load_in_several_types_leave_the_default_one(tiny: Callable[[str], Path]) -> None:
    folder, failed = tiny("llama"), []
    begin = threading.Barrier(4)

    def load(dtype: str) -> None:
        try:
            begin.wait(30)
            for _ in range(6):
                files = ModelFiles(folder, dtype=dtype)
                (stage,) = build_stages(files, make_cut(files.blocks, ()).segments)
                assert {str(p.dtype) for p in stage.part.module.parameters()} == {f"torch.{dtype}"}
        except Exception as error:  # noqa: BLE001 - of another thread, told below
            failed.append(error)

    threads = [threading.Thread(target=load, args=(dtype,)) for dtype in ("bfloat16", "float32", "float16", "bfloat16")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert torch.get_default_dtype() is torch.float32
