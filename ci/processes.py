"""Ending processes that were started in a session of their own (``start_new_session=True``)."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

__all__ = ["end"]


def end(process: subprocess.Popen[Any], seconds: float) -> None:
    """End a process and those that it has started: asked first, killed if that takes longer than ``seconds``."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(seconds)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
