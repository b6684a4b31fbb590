"""The same two stages under torch.distributed.pipelining: gloo, 1F1B, one process per stage."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from splitlm.bench.arm import Arm
from splitlm.bench.echo import listening
from splitlm.bench.trainuncut import Rounds
from splitlm.core.errors import SplitlmError
from splitlm.model.tuned import TunedPart


class _Stage(nn.Module):
    """A part as a pipeline runs it: one tensor in, one out. All rows have the same length, so its mask is all ones."""

    def __init__(self, part: TunedPart, base: str) -> None:
        super().__init__()
        segment = part.segment
        self._module: Any = part.part.module
        self._run: Any = self._module if segment.head else getattr(self._module, base)
        self._name = "input_ids" if segment.embed else "inputs_embeds"
        self._head = segment.head

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Hidden states, or logits of the last stage."""
        mask = torch.ones(inputs.shape[:2], dtype=torch.int64)
        out = self._run(**{self._name: inputs, "attention_mask": mask})
        found: torch.Tensor = out.logits if self._head else out[0]
        return found


class PipeStage:
    """One stage of the pipeline.

    Args:
        config: of the two-stage run it stands beside, as a mapping.
        rank: 0 or 1.
        port: of torch's store.
    """

    def __init__(self, *, config: dict[str, Any], rank: int, port: int) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._rank, self._rounds = rank, Rounds(config, 1)
        recipe = self._rounds.recipe
        (loaded,) = recipe.files.load([recipe.segments[rank]])
        part = TunedPart(loaded, recipe.files)
        part.train(dropout=True)  # as every party
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        self._optimizer = recipe.how.make(part.parameters())
        self._chunks = self._rounds.config.learning.control_count
        stage = PipelineStage(_Stage(part, recipe.files.family.base), rank, 2, torch.device("cpu"))
        self._schedule = Schedule1F1B(stage, self._chunks, loss_fn=nn.functional.cross_entropy)
        self.told: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """One round: forwards and backwards of a window's microbatches, then a step of each stage."""
        batches = self._rounds.batches()
        begin = time.perf_counter()
        for at in range(0, len(batches), self._chunks):
            window = batches[at : at + self._chunks]
            if self._rank == 0:
                self._schedule.step(torch.cat([batch.ids for batch in window]))
            else:
                losses: list[torch.Tensor] = []
                self._schedule.step(target=torch.cat([batch.labels for batch in window]), losses=losses)
                _ = [loss.item() for loss in losses]
            if self._optimizer is not None:
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)
        return {"rows": sum(batch.samples for batch in batches), "seconds": time.perf_counter() - begin}

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


class PipeWork:
    """Both stages, each on a core of its own.

    Args:
        config: of the two-stage run it stands beside, as a mapping.
        cores: of the stages; None leaves them free.
    """

    def __init__(self, *, config: dict[str, Any], cores: list[int] | None = None) -> None:
        with listening() as probe:
            port = probe.getsockname()[1]
        pins: list[int | None] = [None, None] if cores is None else [*cores]
        self._stages = [
            Arm("train-pipe-stage", config=config, rank=rank, port=port, core=core) for rank, core in enumerate(pins)
        ]
        try:
            for stage in self._stages:
                stage.ready()
        except SplitlmError:
            self.close()
            raise
        self.told: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """One round; as long as the slower stage took."""
        for stage in self._stages:
            stage.ask()
        took = [stage.answer() for stage in self._stages]
        return {"rows": took[0]["rows"], "seconds": max(float(one["seconds"]) for one in took)}

    def close(self) -> None:
        """End both."""
        for stage in self._stages:
            stage.close()
