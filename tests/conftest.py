"""What holds for all tests."""

from __future__ import annotations

import os
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    # Threads that spin while they wait for others would take the cores from the other workers. Read as OpenMP is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import convpar

# Wide enough that no table breaks a name.
os.environ["COLUMNS"] = "160"

if Path(convpar.__file__).parent.parent != Path(__file__).parent.parent:
    # The installed package is under test: a subprocess must not import the source tree from the current folder.
    os.environ["PYTHONSAFEPATH"] = "1"
