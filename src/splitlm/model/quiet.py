"""Loading through transformers without its progress bars, which do not know whose terminal it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers.utils import logging


@contextlib.contextmanager
def no_bars() -> Iterator[None]:
    """No bars for a while; the setting is put back."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
