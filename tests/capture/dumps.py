"""What two ranks dump."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.dist import pool


@functools.cache
def dumps_of(train: Callable[[str], None]) -> tuple[dict[str, str], dict[str, str]]:
    """The files of rank 0 and of rank 1 that `train(dump_dir)` leaves: name -> text."""
    with tempfile.TemporaryDirectory() as folder:
        pool.run(2, train, folder)
        ranks = [Path(folder) / f"rank{rank}" for rank in (0, 1)]
        first, second = ({path.name: path.read_text() for path in rank.iterdir()} for rank in ranks)
        return first, second


def stage_of(train: Callable[[str], None], name: str) -> str:
    """The one file of that direction and stage, as "bwd.captured", whatever its number; or "order0"."""
    if "." not in name:
        return dumps_of(train)[0][f"{name}.txt"]
    file_name = re.compile(r"graph0\.{}\.\d\d\.{}\.txt".format(*name.split(".")))
    (text,) = (text for file, text in dumps_of(train)[0].items() if file_name.fullmatch(file))
    return text
