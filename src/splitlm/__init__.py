"""Run and fine-tune one language model cut across the machines you have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitlm.core.sampling import Sampling
    from splitlm.finetune.objective import register_objective
    from splitlm.local import Generation, Ring
    from splitlm.node.plan import Plan, plan
    from splitlm.training import TrainRun, train

__version__ = "0.1.0"
__all__ = ["Generation", "Plan", "Ring", "Sampling", "TrainRun", "__version__", "plan", "register_objective", "train"]

_WHERE = {
    "Generation": "splitlm.local",
    "Plan": "splitlm.node.plan",
    "Ring": "splitlm.local",
    "Sampling": "splitlm.core.sampling",
    "TrainRun": "splitlm.training",
    "plan": "splitlm.node.plan",
    "register_objective": "splitlm.finetune.objective",
    "train": "splitlm.training",
}


def __getattr__(name: str) -> Any:
    """Import public names when they are first used (PEP 562), so that ``import splitlm`` stays light."""
    if name not in _WHERE:
        raise AttributeError(f"module 'splitlm' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_WHERE[name]), name)
