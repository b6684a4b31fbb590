"""A language model learns GSM8K's answers through adapters, cut in three: the loss before and after, and who loads it.

python benchmarks/lora_gsm8k.py DATA [--model smollm2-135m] [--rows 96] [--seed 1]

DATA is a folder with GSM8K's splits as JSON lines. The adapter is then loaded by peft, merged, and the merged model
loaded by transformers and by ``splitlm generate``.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import splitlm
from splitlm.finetune.data import Rows, load_rows, prompt_of
from splitlm.model.checkpoint import merge
from splitlm.model.source import resolve


def settings(asked: argparse.Namespace, model: Path) -> dict[str, Any]:
    """One owner with the first and the last two blocks, one worker with those between."""
    return {
        "name": "gsm8k-lora",
        "server": {
            "architecture": "u-shape",
            "clients": [1, 1],
            "cut-layers": 2,
            "tail-blocks": 2,
            "model-name": str(model),
            "data-name": "GSM8K",
            "data-path": str(asked.data.resolve()),
            "data-distribution": {"num-sample": asked.rows},
            "validation": False,
            "random-seed": asked.seed,
        },
        "learning": {"learning-rate": 5e-4, "batch-size": 4, "u-shape": {"microbatches-per-window": 2}},
        "fine-tune": {"name": "LoRA", "LoRA": {"r": 8, "alpha": 16}},
    }


@torch.no_grad()
def loss(model: Any, words: Any, rows: Rows) -> float:
    """Mean loss of the answers' tokens, of rows that were not trained on."""
    total, items = 0.0, 0
    for question, answer in zip(rows.texts, rows.answers, strict=True):
        asked, both = words(prompt_of(question)).input_ids, words(prompt_of(question) + answer).input_ids
        labels = torch.tensor([[-100] * len(asked) + both[len(asked) :]])
        count = len(both) - len(asked)
        total += float(model(input_ids=torch.tensor([both]), labels=labels).loss) * count
        items += count
    return total / items


def main() -> None:
    """Train, load, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--test", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    model = resolve(asked.model)
    test = load_rows("GSM8K", "test", asked.data)
    test = Rows(test.source, test.texts[: asked.test], (), test.answers[: asked.test])
    words = AutoTokenizer.from_pretrained(model)
    folder = Path(tempfile.mkdtemp(prefix="splitlm-gsm8k-"))
    try:
        run = splitlm.train(settings(asked, model), folder=folder / "run")
        if run.output is None:
            raise SystemExit("the run left no adapter")
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        before = loss(base, words, test)
        adapted = PeftModel.from_pretrained(base, run.output).eval()
        after = loss(adapted, words, test)
        print(
            f"loss on {len(test)} unseen answers: {before:.4f} before, {after:.4f} after {asked.rows} rows", flush=True
        )
        merge(model, run.output, folder / "merged")
        merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32).eval()
        print(f"merged, by transformers: {loss(merged, words, test):.4f}", flush=True)
        command = [sys.executable, "-m", "splitlm", "generate", str(folder / "merged"), "--quiet", "--no-trace"]
        command += ["--prompt", prompt_of(test.texts[0]), "--max-new-tokens", "60"]
        print("splitlm generate:", subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
