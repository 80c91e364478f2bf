"""Checkpoints of a training run: a folder `step_<n>` each, which is whole once it holds `.metadata`, written last."""

from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp


def save(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Write `state` as the checkpoint of `step`. Every rank writes its own pieces."""
    dcp.save(state, checkpoint_id=folder / f"step_{step}")


def load_newest(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Fill `state` from the newest whole checkpoint; FileNotFoundError when there is none."""
    whole = {int(path.parent.name.removeprefix("step_")): path.parent for path in folder.glob("step_*/.metadata")}
    newest = [max(whole, default=None)]
    dist.broadcast_object_list(newest)  # what rank 0 sees: a file system may be slow to show a file to others
    if newest[0] is None:
        raise FileNotFoundError(f"--resume: expected a checkpoint step_<n> in {folder}, got none")
    dcp.load(state, checkpoint_id=folder / f"step_{newest[0]}")
    return state
