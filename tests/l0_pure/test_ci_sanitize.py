"""The sanitizers' driver, without a GPU: what it starts, and what becomes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ci.sanitize import run

ROOT = Path(__file__).resolve().parents[2]


def test_status_and_output():
    status, out, err = run(["sh", "-c", "echo a; echo b >&2; exit 3"], os.environ)
    assert (status, out, err) == (3, "a\n", "b\n")


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_behind(number, tmp_path):
    """A sanitizer starts the program that it watches; both end with the driver."""
    pids = tmp_path / "pids"
    command = f"sleep 60 & echo $! $$ > {pids}.new; mv {pids}.new {pids}; wait"
    # whoever started the tests may ignore an interrupt, as shells do for what runs in the background; that is inherited
    code = "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += f"from ci.sanitize import run; run(['sh', '-c', {command!r}], os.environ)"
    driver = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    for _ in range(300):
        if pids.exists():
            break
        time.sleep(0.1)
    started = [int(pid) for pid in pids.read_text().split()]
    assert all(map(_alive, started))
    driver.send_signal(number)
    assert driver.wait(30) != 0
    for _ in range(100):
        if not any(map(_alive, started)):
            return
        time.sleep(0.1)
    pytest.fail("still running")
