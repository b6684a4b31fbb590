"""A classifier fine-tuned in two shapes and whole: the accuracy of all three on rows that none of them saw.

python benchmarks/accuracy_emotion.py MODEL DATA [--rows 3200] [--test 400] [--seed 1]

MODEL is the directory of a BERT without its head (MiniLM, say), DATA a folder with EMOTION's splits as JSON lines. The
uncut loop trains on the same microbatches in the same order, with the same optimizer, whole and in one process.
Accuracies are transformers' own, of the models that the runs leave.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import splitlm
from splitlm.core.config import read
from splitlm.finetune.data import Rows, load_rows
from splitlm.finetune.output import write_outputs
from splitlm.finetune.recipe import OwnerData, open_recipe, read_rows
from splitlm.model.uncut_train import UncutTrainer


def settings(asked: argparse.Namespace, shape: str, workers: int) -> dict[str, Any]:
    """What a run of this shape is told: a step for every 32 rows."""
    return {
        "name": f"emotion-{shape}",
        "server": {
            "architecture": shape,
            "clients": [1, workers],
            "cut-layers": 1,
            "tail-blocks": 1,
            "model-name": "Bert",
            "model-path": str(asked.model.resolve()),
            "data-name": "EMOTION",
            "data-path": str(asked.data.resolve()),
            "data-distribution": {"num-sample": asked.rows},
            "validation": False,
            "random-seed": asked.seed,
        },
        "learning": {
            "learning-rate": 2e-4,
            "batch-size": 16,
            "control-count": 2,
            "body-sync": "window",
            "u-shape": {"microbatches-per-window": 2},
        },
    }


def uncut(asked: argparse.Namespace, folder: Path) -> Path:
    """The same training in one process; the folder of the model that it makes."""
    config = read(settings(asked, "u-shape", 1), "uncut")
    rows = read_rows(config, "train")
    recipe = open_recipe(config, asked.model, rows.num_labels)
    whole = UncutTrainer(
        recipe.files, recipe.shape, recipe.segments, recipe.goal, recipe.how, seed=config.server.random_seed
    )
    batches = OwnerData(recipe, 0, rows, None).round(0)
    for number, begin in enumerate(range(0, len(batches), 2)):
        whole.window(0, number, {0: batches[begin : begin + 2]})
    return write_outputs(folder, recipe, {n: p.detach() for n, p in (whole.own[0] | whole.body).items()})


@torch.no_grad()
def accuracy(folder: Path, tokenizer: Path, rows: Rows, count: int) -> float:
    """The share of the first ``count`` rows that a model gets right."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    words = AutoTokenizer.from_pretrained(tokenizer)
    right = 0
    for begin in range(0, count, 50):
        end = min(begin + 50, count)
        given = words(list(rows.texts[begin:end]), padding=True, truncation=True, max_length=128, return_tensors="pt")
        found = model(**given).logits.argmax(dim=-1)
        right += int((found == torch.tensor(rows.labels[begin:end])).sum())
    return right / count


def main() -> None:
    """Train three times, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, default=3200)
    parser.add_argument("--test", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    test = load_rows("EMOTION", "test", asked.data)
    folder = Path(tempfile.mkdtemp(prefix="splitlm-emotion-"))
    try:
        for name, shape, workers in (("u-shape, 1 owner + 2 workers", "u-shape", 2), ("two-stage", "two-stage", 1)):
            made = splitlm.train(settings(asked, shape, workers), folder=folder / shape).output
            if made is None:
                raise SystemExit(f"{name} left no model")
            print(f"{name}: {accuracy(made, asked.model, test, asked.test):.4f}", flush=True)
        print(f"uncut: {accuracy(uncut(asked, folder / 'uncut'), asked.model, test, asked.test):.4f}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
