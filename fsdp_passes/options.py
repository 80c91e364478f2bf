"""The options of `torch.compile(backend="fsdp_opt", options={...})`, and the environment behind them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

DUMP_VARIABLE = "FSDP_PASSES_DUMP"
POISON_VARIABLE = "FSDP_PASSES_POISON"

_CHOICES: dict[str, tuple[object, ...]] = {
    "grad_path": ("views", "cat_last", "cat"),
    "wgrad": ("round", "fp32"),
    "codegen": ("inductor", "fx"),
    "verify": (0, 1, 2),
    "poison": (False, True),
}


@dataclass(frozen=True)
class Options:
    """grad_path: "views" writes each gradient into its slice of a flat buffer; "cat_last" into a tensor of its own, and
        concatenates when it reduces; "cat", the reference, concatenates in every backward.
    accumulate_bytes: what a rank may hold of unreduced gradients between microbatches, in bytes; None: no limit.
        Units beyond it reduce in every backward, under no_sync() too.
    in_flight: most units that are gathered at once, in use or ahead of it; also most reductions under way. None: no
        bound.
    keep_gathered_bytes: units that fill so many bytes best stay gathered from one microbatch of a window to the next,
        beside `in_flight`.
    wgrad: "round" rounds a weight's gradient to the compute dtype before it is added up; "fp32" adds products up in
        fp32, unrounded.
    codegen: "inductor" compiles what lies between two communications; "fx" runs the captured operators one by one.
    verify: 0 no rules, 1 the cheap ones, 2 also re-infers every type.
    dump_dir: where graphs and plans are written; default: the environment variable FSDP_PASSES_DUMP.
    poison: for finding errors of the schedule: what is released is overwritten by NaN; default: whether the environment
        variable FSDP_PASSES_POISON is 1.
    """

    grad_path: str = "views"
    accumulate_bytes: int | None = None
    in_flight: int | None = 2
    keep_gathered_bytes: int = 0
    wgrad: str = "round"
    codegen: str = "inductor"
    verify: int = 1
    dump_dir: Path | None = None
    poison: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> Options:
        """ValueError for an unknown name, which lists the known ones, or a value that is no choice or no limit."""
        if given is not None and not isinstance(given, Mapping):
            raise ValueError(f"options: expected a dict or None, got {given!r}")
        given = dict(given or {})
        known = [field.name for field in fields(cls)]
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"options: expected names among {', '.join(known)}, got {name!r}")
            choices = _CHOICES.get(name)
            if choices is not None and (type(value), value) not in [(type(c), c) for c in choices]:
                raise ValueError(f"options[{name!r}]: expected one of {choices}, got {value!r}")
        limit = given.get("accumulate_bytes")
        if limit is not None and (type(limit) is not int or limit < 0):
            raise ValueError(f"options['accumulate_bytes']: expected None or a number of bytes, got {limit!r}")
        in_flight = given.get("in_flight", cls.in_flight)
        if in_flight is not None and (type(in_flight) is not int or in_flight < 1):
            raise ValueError(f"options['in_flight']: expected None or a number of units from 1 on, got {in_flight!r}")
        kept = given.get("keep_gathered_bytes", cls.keep_gathered_bytes)
        if type(kept) is not int or kept < 0:
            raise ValueError(f"options['keep_gathered_bytes']: expected a number of bytes, got {kept!r}")
        if given.get("wgrad") == "fp32" and given.get("grad_path") == "cat":
            raise ValueError("options['wgrad']: expected 'round' with grad_path='cat', which has no slices, got 'fp32'")
        dump_dir = given.pop("dump_dir", None)
        if dump_dir is not None and not isinstance(dump_dir, str | os.PathLike):
            raise ValueError(f"options['dump_dir']: expected a path or None, got {dump_dir!r}")
        dump_dir = dump_dir or os.environ.get(DUMP_VARIABLE)
        given.setdefault("poison", os.environ.get(POISON_VARIABLE) == "1")
        return cls(**given, dump_dir=Path(dump_dir) if dump_dir else None)
