"""What fewer bits cost: perplexity, and how often the most probable token stays, by engine and text.

python benchmarks/quality.py [TEXT ...] [--model smollm2-135m] [--compute fast,int8,int4] [--tokens 512] [--threads 2]
                             [--tune 200]

TEXT is a file in UTF-8, such as tinyshakespeare or a sample of TinyStories; without one, a short text of ours is read.
With --tune, all weights are trained for so many steps on the first TEXT before anything is measured: what was rounded
when the model was published is then rounded no more, and an engine shows what it does to weights of full precision.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from splitlm.check.quality import quality
from splitlm.model.source import resolve

ROWS, LENGTH, RATE = 2, 128, 2e-5
"""Of a training step: sequences, tokens of each, and AdamW's rate."""
SEED = 1
WIDTHS = (24, 24, 11, 11, 16, 15)


def line(*cells: str) -> str:
    """One row of the table."""
    return " ".join(f"{cell:<{width}}" for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def tuned(model: str, text: Path, steps: int, folder: Path) -> None:
    """Train all weights of a model in float32 on a text, and save it under ``folder``."""
    source = resolve(model)
    tokenizer = AutoTokenizer.from_pretrained(source)
    net = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).train()
    ids = torch.tensor(tokenizer(text.read_text(encoding="utf-8")[: steps * ROWS * LENGTH * 8])["input_ids"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    draw = torch.Generator().manual_seed(SEED)
    for step in range(steps):
        at = torch.randint(0, len(ids) - LENGTH, (ROWS,), generator=draw).tolist()
        batch = torch.stack([ids[begin : begin + LENGTH] for begin in at])
        loss = net(input_ids=batch, labels=batch).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step in (0, steps - 1):
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    net.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Read what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", type=Path, metavar="TEXT")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--compute", default="fast,int8,int4")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tune", type=int, default=0, metavar="STEPS")
    asked = parser.parse_args()
    if asked.tune and not asked.texts:
        parser.error("--tune needs a TEXT to train on")
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory() as folder:
        if asked.tune:
            tuned(asked.model, asked.texts[0], asked.tune, Path(folder))
        table(asked, folder if asked.tune else asked.model)


def table(asked: argparse.Namespace, model: str) -> None:
    """Measure every text, and print one table."""
    print(line("text", "engine", "perplexity", "same top-1", "largest |Δlogit|", "median |Δlogit|"), flush=True)
    for text in asked.texts or [None]:
        found = quality(model, asked.compute.split(","), text=text, tokens=asked.tokens, threads=asked.threads)
        for column in found.columns:
            name = column.name if column.engine in (column.name, "exact") else column.engine
            figures = (
                f"{column.perplexity:.3f}",
                f"{column.top1:.2%}",
                f"{column.largest:.2g}",
                f"{column.median:.2g}",
            )
            print(line(text.stem if text is not None else "(ours)", name, *figures), flush=True)
        if found.rounding is not None:
            print(f"  {found.scored} tokens; {found.rounding.share:.2%} of the weights are not exact in float16")


if __name__ == "__main__":
    main()
