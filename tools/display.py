"""Progress of a training run: a bar on a terminal, a line now and then anywhere else."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

NUM_LINES = 8  # printed by a run whose output is not a terminal

ShowStep = Callable[[float, float, int | None], None]


def mebibytes(num_bytes: int | None) -> str:
    """`12.3 MiB`, or `not measured`."""
    return "not measured" if num_bytes is None else f"{num_bytes / 2**20:.1f} MiB"


@contextlib.contextmanager
def step_display(title: str, num_steps: int, *, first: int = 0, enabled: bool = True) -> Iterator[ShowStep]:
    """Gives `show(loss, tokens_per_s, peak_bytes)`, to be called once a step; silent unless `enabled`.

    first: steps that were done before.
    """
    console = Console(quiet=not enabled, highlight=False)
    show_steps = _bar if console.is_terminal else _lines
    with show_steps(console, title, num_steps, first) as show:
        yield show


def _describe(loss: float, tokens_per_s: float, peak_bytes: int | None) -> str:
    return f"loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s  peak {mebibytes(peak_bytes)}"


@contextlib.contextmanager
def _bar(console: Console, title: str, num_steps: int, first: int) -> Iterator[ShowStep]:
    state = TextColumn("{task.description}")
    columns = (TextColumn(title), BarColumn(bar_width=24), MofNCompleteColumn(), state, TimeElapsedColumn())
    # Drawn once a step: a refresh thread would take CPU time from the ranks.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("compiling", total=num_steps, completed=first)
        progress.refresh()

        def show(loss: float, tokens_per_s: float, peak_bytes: int | None) -> None:
            progress.update(task, advance=1, description=_describe(loss, tokens_per_s, peak_bytes))
            progress.refresh()

        yield show


@contextlib.contextmanager
def _lines(console: Console, title: str, num_steps: int, first: int) -> Iterator[ShowStep]:
    steps_per_line = max(1, (num_steps - first) // NUM_LINES)
    done = first

    def show(loss: float, tokens_per_s: float, peak_bytes: int | None) -> None:
        nonlocal done
        done += 1
        if done in (first + 1, num_steps) or done % steps_per_line == 0:
            console.print(f"{title} step {done}/{num_steps}  {_describe(loss, tokens_per_s, peak_bytes)}")

    yield show
