"""The buffer of a flat group's gradients: what its pieces hold, and what was never written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_passes.sharding.grad_buffer import GradBuffer, GradSlot, prepare
from fsdp_passes.sharding.layout import plan_layout

# Pieces: a matrix, padding, a bias, padding, an empty parameter, a scalar, padding.
LAYOUT = plan_layout([torch.Size(shape) for shape in ((2, 3), (4,), (0,), ())], world_size=2, align=8)
PARAMS = LAYOUT.pieces
PADDING = [piece for piece in range(len(LAYOUT.sizes)) if piece not in PARAMS]


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is not initialised holds NaN."""
    new_empty: Callable[..., Tensor] = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **kwargs: new_empty(*args, **kwargs).fill_(torch.nan))


def buffer_of(separate: bool, dtype: torch.dtype = torch.float32) -> GradBuffer:
    return GradBuffer(LAYOUT, dtype, torch.device("cpu"), separate)


def values(start: int, elems: int = LAYOUT.full_elems) -> Tensor:
    return torch.arange(float(start), start + elems)


def of_params(full: Tensor) -> Tensor:
    """`full` with zeros for padding."""
    pieces = enumerate(full.split(list(LAYOUT.sizes)))
    return torch.cat([piece if number in PARAMS else torch.zeros_like(piece) for number, piece in pieces])


def write(buffer: GradBuffer, piece: int, gradient: Tensor) -> None:
    """As a region does."""
    slot = GradSlot(buffer.slice(piece), buffer, piece)
    if prepare([slot]):
        slot.tensor.copy_(gradient)
    else:
        slot.tensor.add_(gradient)
    slot.mark_written()


def expected(**pieces: Any) -> Tensor:
    """The whole, zeros but in piece `p<number>`."""
    given = {int(name[1:]): value for name, value in pieces.items()}
    return torch.cat([torch.zeros(size) + given.get(piece, 0) for piece, size in enumerate(LAYOUT.sizes)])


both = pytest.mark.parametrize("separate", [False, True], ids=["flat", "separate"])


@both
@pytest.mark.parametrize("written", [(), (0,), (2, 0), (5,), (4,), PARAMS])
def test_what_nothing_wrote_and_the_padding_are_zeros(separate: bool, written: tuple[int, ...]) -> None:
    buffer = buffer_of(separate)
    for piece in range(len(LAYOUT.sizes)):
        assert buffer.slice(piece).shape == (LAYOUT.sizes[piece],)  # asked for, and not written
    for piece in written:
        write(buffer, piece, torch.full((LAYOUT.sizes[piece],), piece + 1.0))
    assert buffer.written == set(written)
    taken = buffer.take()
    assert taken.shape == (LAYOUT.full_elems,)
    assert torch.equal(taken, expected(**{f"p{piece}": piece + 1 for piece in written}))


@both
def test_a_buffer_without_slices_is_zeros(separate: bool) -> None:
    assert torch.equal(buffer_of(separate).take(), torch.zeros(LAYOUT.full_elems))


@both
def test_a_piece_has_one_place(separate: bool) -> None:
    """That of a flat buffer is in what is taken, which costs no copy."""
    buffer = buffer_of(separate)
    write(buffer, 2, torch.ones(4))
    assert buffer.slice(2).data_ptr() == buffer.slice(2).data_ptr()
    assert torch.equal(buffer.slice(2), torch.ones(4))
    place = buffer.slice(2).data_ptr() - 4 * sum(LAYOUT.sizes[:2])
    assert (buffer.take().data_ptr() == place) is not separate


@both
def test_sums_are_of_the_buffers_dtype(separate: bool) -> None:
    """256 + 1 is 256 in bfloat16."""
    for dtype, total in ((torch.float32, 257), (torch.bfloat16, 256)):
        written, added = buffer_of(separate, dtype), buffer_of(separate, dtype)
        for number in (256.0, 1.0):
            write(written, 0, torch.full((6,), number, dtype=torch.bfloat16))
            added.add(torch.full((LAYOUT.full_elems,), number, dtype=torch.bfloat16), None)
        assert torch.equal(written.take(), expected(p0=total).to(dtype))
        assert torch.equal(added.take(), of_params(torch.full((LAYOUT.full_elems,), total, dtype=dtype)))


@both
def test_whole_gradients_are_copied_in_and_added_up(separate: bool) -> None:
    buffer, first, second = buffer_of(separate), values(1), values(100)
    buffer.add(first, None)
    assert buffer.written == set(PARAMS)
    buffer.add(second, None)
    assert torch.equal(buffer.take(), of_params(values(1) + values(100)))
    assert torch.equal(first, values(1))  # no alias
    assert torch.equal(second, values(100))


def test_whole_gradients_are_added_up_in_the_buffer_that_is_there() -> None:
    buffer = buffer_of(separate=False)
    place = buffer.slice(0).data_ptr()
    for number in (1, 2):
        buffer.add(values(number), None)
        assert buffer.slice(0).data_ptr() == buffer.take().data_ptr() == place


@both
def test_a_whole_gradient_has_zeros_where_it_has_no_pieces(separate: bool) -> None:
    buffer = buffer_of(separate)
    buffer.add(expected(p0=2), [0])
    assert buffer.written == {0}
    buffer.add(expected(p2=3), [2])
    assert buffer.written == {0, 2}
    assert torch.equal(buffer.take(), expected(p0=2, p2=3))


@both
@pytest.mark.parametrize("order", ["slices first", "whole first", "slices, whole, slices"])
def test_slices_and_whole_gradients_add_up(separate: bool, order: str) -> None:
    """A unit in two graphs, one of which was declined."""
    buffer = buffer_of(separate)
    if order != "whole first":
        write(buffer, 0, values(1, 6))
        write(buffer, 5, torch.tensor([8.0]))
    buffer.add(expected(p0=values(20, 6), p2=values(30, 4)), [0, 2])
    if order != "slices first":
        write(buffer, 0, values(40, 6))
        write(buffer, 5, torch.tensor([16.0]))
    slices = [start for start, skipped in ((1, "whole first"), (40, "slices first")) if order != skipped]
    scalar = {"slices first": 8, "whole first": 16}.get(order, 24)
    matrix = values(20, 6) + sum(values(start, 6) for start in slices)
    assert buffer.written == {0, 2, 5}
    assert torch.equal(buffer.take(), expected(p0=matrix, p2=values(30, 4), p5=scalar))


@both
def test_a_discarded_piece_is_nobodys_gradient(separate: bool) -> None:
    buffer = buffer_of(separate)
    for piece in (0, 2, 5):
        write(buffer, piece, torch.full((LAYOUT.sizes[piece],), torch.nan))
        buffer.written.discard(piece)
        if piece != 5:
            write(buffer, piece, torch.full((LAYOUT.sizes[piece],), 3.0))
    buffer.written.discard(2)
    assert torch.equal(buffer.take(), expected(p0=3))


@both
def test_a_whole_gradient_copies_after_all_pieces_were_discarded(separate: bool) -> None:
    buffer = buffer_of(separate)
    write(buffer, 0, torch.full((6,), torch.nan))
    buffer.written.discard(0)
    buffer.add(values(1), None)
    assert torch.equal(buffer.take(), of_params(values(1)))


BLANK, WRITTEN, UNWANTED = "blank", "written", "unwanted"


@both
@pytest.mark.parametrize(
    "states, copies",
    [
        ([], True),
        ([BLANK, BLANK], True),
        ([UNWANTED], True),
        ([BLANK, UNWANTED], True),
        ([WRITTEN, WRITTEN], False),
        ([BLANK, WRITTEN, BLANK], False),
        ([WRITTEN, UNWANTED], False),
    ],
)
def test_writes_copy_if_all_places_are_blank_and_else_add_to_zeros(
    separate: bool, states: list[str], copies: bool
) -> None:
    buffer = buffer_of(separate)
    slots = [
        GradSlot(torch.full((2,), torch.nan), None, piece)
        if state == UNWANTED
        else GradSlot(buffer.slice(piece).fill_(torch.nan), buffer, piece)
        for piece, state in zip(PARAMS, states, strict=False)
    ]
    for slot, state in zip(slots, states, strict=True):
        if state == WRITTEN:
            slot.tensor.fill_(5)
            slot.mark_written()
    assert [slot.is_blank for slot in slots] == [state != WRITTEN for state in states]
    assert prepare(slots) is copies
    for slot, state in zip(slots, states, strict=True):
        held = 5.0 if state == WRITTEN else torch.nan if copies else 0.0
        assert torch.equal(slot.tensor.nan_to_num(-1), torch.full_like(slot.tensor, held).nan_to_num(-1))
    assert buffer.written == {piece for piece, state in zip(PARAMS, states, strict=False) if state == WRITTEN}


def test_a_gradient_that_is_not_wanted_is_never_a_gradient() -> None:
    slot = GradSlot(torch.zeros(2), None, 0)
    slot.mark_written()
    assert slot.is_blank
