"""What fewer bits cost: perplexity, and how often the most probable token stays, by engine and text.

python benchmarks/quality.py [TEXT ...] [--model smollm2-135m] [--compute fast,int8,int4] [--tokens 512] [--threads 2]

TEXT is a file in UTF-8, such as tinyshakespeare or a sample of TinyStories; without one, a short text of ours is read.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from splitlm.check.quality import quality

WIDTHS = (24, 24, 11, 11, 16, 15)


def line(*cells: str) -> str:
    """One row of the table."""
    return " ".join(f"{cell:<{width}}" for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def main() -> None:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", type=Path, metavar="TEXT")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--compute", default="fast,int8,int4")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    print(line("text", "engine", "perplexity", "same top-1", "largest |Δlogit|", "median |Δlogit|"), flush=True)
    for text in asked.texts or [None]:
        found = quality(asked.model, asked.compute.split(","), text=text, tokens=asked.tokens, threads=asked.threads)
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
