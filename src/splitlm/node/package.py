"""How a child process finds this very package, wherever it was imported from. Imports nothing heavy."""

from __future__ import annotations

import os
from pathlib import Path

import splitlm


def own_package() -> dict[str, str]:
    """What a child's environment needs to run this very package, wherever it was imported from.

    Its working directory, a user's, is not searched for modules: a queue.py there would be taken for Python's.
    """
    source = Path(splitlm.__file__).parents[1]
    paths = [os.environ.get("PYTHONPATH", ""), "" if source.name.endswith("-packages") else str(source)]
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
