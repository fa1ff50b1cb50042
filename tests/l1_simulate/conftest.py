"""The simulator's tests need compiled kernels, tests/l1_interpret interpreted ones; one process can have only one kind.

Where this process interprets (TRITON_INTERPRET=1, set by tests/l1_interpret on a machine without a GPU), only
test_in_own_process.py is collected: it runs this folder in a process of its own and fails if anything in it fails.
"""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore_glob = ["test_[!i]*.py", "test_inst*.py"]
else:
    collect_ignore_glob = ["test_in_own_process.py"]
