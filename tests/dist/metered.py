"""Run a function in a process whose heap is counted by tools/alloc_meter.c."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import demo
from rich.console import Console

CHECKOUT = Path(__file__).resolve().parents[2]


def run(module: str, call: str) -> Any:
    """What `call`, such as "main(2)", of `module` prints as JSON, there and in the ranks that it starts."""
    meter = demo.build_meter(Console(stderr=True))
    assert meter is not None
    # A block that is mapped by itself has the size that was asked for, whatever was freed before.
    environment = os.environ | {"LD_PRELOAD": str(meter), "MALLOC_MMAP_THRESHOLD_": "65536"}
    environment["PYTHONPATH"] = os.pathsep.join([str(CHECKOUT), str(CHECKOUT / "tools")])
    command = [sys.executable, "-c", f"import {module}; {module}.{call}"]
    done = subprocess.run(command, env=environment, cwd=CHECKOUT, check=True, stdout=subprocess.PIPE, timeout=300)
    return json.loads(done.stdout)
