"""What holds for all tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    # Threads that spin while they wait for others would take the cores from the other workers. Read as OpenMP is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import convpar

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As shells set it for what runs in the background, and subprocesses inherit it: Ctrl-C is tested there, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Wide enough that no table breaks a name.
os.environ["COLUMNS"] = "160"

if Path(convpar.__file__).parent.parent != Path(__file__).parent.parent:
    # The installed package is under test: a subprocess must not import the source tree from the current folder.
    os.environ["PYTHONSAFEPATH"] = "1"
