"""One flat group: the parameters of a unit that share dtype and requires_grad, as one sharded buffer."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_passes._compat import backward_reaches, running_backward, swap_contents, warn_once
from fsdp_passes.ir.ops import set_owner
from fsdp_passes.runtime.agreement import Sent
from fsdp_passes.runtime.collectives import another_group, issue_all_gather
from fsdp_passes.sharding.grad_buffer import GradSlot
from fsdp_passes.sharding.gradients import GroupGradients
from fsdp_passes.sharding.layout import Layout
from fsdp_passes.sharding.param import ShardedParam
from fsdp_passes.sharding.place import Place
from fsdp_passes.sharding.poison import poison

if TYPE_CHECKING:
    from fsdp_passes.sharding.model import ShardedModel

log = logging.getLogger(__name__)


class FlatGroup:
    """`shard` is a 1-D leaf of `layout.shard_elems` elements; `params` are its parameters, as views."""

    def __init__(
        self,
        *,
        unit: str,
        names: tuple[str, ...],
        layout: Layout,
        shard: nn.Parameter,
        process_group: dist.ProcessGroup,
        compute_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        reshard: bool,
        model: ShardedModel,
    ) -> None:
        self.unit, self.names, self.layout = unit, names, layout
        self.process_group, self.reduce_group = process_group, another_group(process_group, "reductions")
        self.compute_dtype, self.reduce_dtype, self.reshard = compute_dtype, reduce_dtype, reshard
        self.model = model
        # Parameters without a gradient, though backward may compute one for the sake of the others.
        self.frozen = set() if shard.requires_grad else set(range(len(names)))
        self._own(shard)

    def _own(self, shard: nn.Parameter) -> None:
        self.gradients = GroupGradients(self)
        self._hold(shard)

    def _hold(self, shard: nn.Parameter) -> None:
        self.shard = shard
        self._wire: tuple[tuple[int, int], Tensor] | None = None
        self.params = [self._make_param(index) for index in range(len(self.names))]
        set_owner(shard, self)

    def move_to(self, device: torch.device) -> None:
        """Unwritten memory on `device`, none on the meta device. Shard and parameters stay the objects they are.

        An exception leaves all as it was.
        """
        shard, params = self.shard, self.params
        values = torch.zeros(shard.shape, dtype=shard.dtype, device=device)
        self._hold(nn.Parameter(values, requires_grad=shard.requires_grad))
        for param in self.params:
            poison(param.local)
        pairs = list(zip((shard, *params), (self.shard, *self.params), strict=True))
        done: list[tuple[Tensor, Tensor]] = []
        try:
            for old, new in pairs:
                vars(new).update({key: value for key, value in vars(old).items() if key not in vars(new)})  # the user's
                swap_contents(old, new)
                done.append((old, new))
        except BaseException:
            for old, new in done:
                swap_contents(old, new)
            raise
        finally:
            self.shard, self.params = shard, params

    def _make_param(self, index: int) -> ShardedParam:
        place = Place(
            shape=self.layout.shapes[index],
            offset=self.layout.offsets[index],
            shard_elems=self.layout.shard_elems,
            rank=self.process_group.rank(),
            world_size=self.layout.world_size,
            process_group=self.process_group,
            name=self.names[index],
            agreement=self.model.agreement,
        )
        local = _slice_of_shard(self.shard.detach(), place)
        param = ShardedParam(local, place, requires_grad=index not in self.frozen)
        param.bind(self.gradients, index)
        return param

    @property
    def trained(self) -> set[int]:
        return set(range(len(self.names))) - self.frozen

    def set_trained(self, index: int, trained: bool) -> None:
        """Freeze or unfreeze a parameter. The shard is a leaf that needs a gradient while one of them is trained."""
        self.frozen = self.frozen - {index} if trained else self.frozen | {index}
        self.shard.requires_grad_(len(self.frozen) < len(self.params))
        self.model.forget_deferral()

    def local(self, flat: Tensor, index: int) -> Tensor:
        """This rank's piece of parameter `index` in `flat`, a tensor laid out like the shard."""
        return _slice_of_shard(flat.detach(), self.params[index].place)

    @property
    def version(self) -> int:
        """Another number after each edit of the shard."""
        return self.shard._version

    def wire_shard(self, dtype: torch.dtype) -> Tensor:
        """The shard in `dtype`; a cast is made once a window, and per change of the shard (its version counter)."""
        if dtype == self.shard.dtype:
            return self.shard.detach()
        state = self.version, self.model.agreement.step
        if self._wire is None or self._wire[0] != state or self._wire[1].dtype != dtype:
            self._wire = (state, self.shard.detach().to(dtype))
            self.model.streams.gather.follow_compute()
        return self._wire[1]

    def empty_full(self, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            return torch.empty(self.layout.full_elems, dtype=dtype, device=self.shard.device)

    def issue_gather(self, full: Tensor) -> Sent:
        """Fill `full`, 1-D of `layout.full_elems` elements, which is readable after the returned work's wait.

        The gather stream follows what wrote `full` and the shard already.
        """
        work = issue_all_gather(full, self.wire_shard(full.dtype), self.process_group, self.model.streams.gather)
        return Sent(work, self.line("gather", full.dtype), self.model.agreement)

    def gather_into(self, full: Tensor) -> None:
        """Fill `full`, which is readable at once."""
        self.model.streams.gather.follow_compute()
        self.issue_gather(full).wait()

    def line(self, collective: str, dtype: torch.dtype) -> str:
        """What the ranks compare before they send a whole flat group in `dtype`."""
        name, elems = str(dtype).removeprefix("torch."), self.layout.full_elems
        return f'{collective} of unit "{self.unit}" ({elems} x {name}, from {self.names[0]} on)'

    def gather(self, dtype: torch.dtype) -> Tensor:
        self.model.agreement.check([self.line("gather", dtype)])
        full = self.empty_full(dtype)
        self.gather_into(full)
        return full

    def reduce(self, full_grad: Tensor) -> Tensor:
        """Called where another backend runs the graph: the result goes through autograd into shard.grad."""
        self.gradients.settled |= self.trained
        return self.gradients.reduce_now(full_grad)

    @property
    def full_grad_bytes(self) -> int:
        """What this group's gradients take unreduced; nothing if it is frozen."""
        return self.layout.full_elems * self.reduce_dtype.itemsize if self.shard.requires_grad else 0

    def expect_backward(self) -> None:
        """A forward, whose backward accumulates a gradient of this group, ran; a checkpoint's second run is none."""
        if running_backward() is None:
            self.gradients.forwards += 1

    def wants_gradient(self) -> bool:
        """Asked in a backward: whether it is for parameters, too, or for the gradients of other tensors only."""
        return backward_reaches(self.shard)

    def grad_slot(self, piece: int, shape: Sequence[int], dtype: torch.dtype, separate: bool) -> GradSlot:
        """Where the backward that runs now writes the gradient of `piece`; nowhere if it is for other tensors only."""
        if not self.wants_gradient():
            return GradSlot(self.shard.new_empty(shape, dtype=dtype), None, piece)
        return self.gradients.slot(piece, shape, separate)

    def has_gradient(self, piece: int) -> bool:
        """Whether a write of `piece` would add; asked before there is a slot."""
        buffer = self.gradients.buffer
        return buffer is not None and piece in buffer.written and self.wants_gradient()

    def accumulate(self, full_grad: Tensor, pieces: Sequence[int] | None = None) -> None:
        """Add one backward's gradient of the whole; `pieces` of the layout have one (None: all)."""
        self.gradients.accumulate(full_grad, pieces)
        self.model.reduce_after_backward()

    def is_reduced_by_graph(self) -> bool:
        """Asked in a backward: whether a graph of it is to reduce this group, where it has computed the gradient.

        Not if another backward of this group is to come, or the gradient waits for one.
        """
        return self.wants_gradient() and self.gradients.forwards == 1 and self.model.reduces(self.unit)

    def reduce_if_complete(self) -> None:
        """Reduce at once, or leave it to the end of the whole backward; nothing if that is for other tensors only.

        A group without any gradient takes part, with zeros: on another rank it may have one.
        """
        if not self.wants_gradient():
            return
        self.gradients.differentiated = True
        self.model.reduce_after_backward()
        if self.is_reduced_by_graph():
            self.gradients.issue_reduce()
        elif self.gradients.forwards > 1 and self.model.reduces(self.unit):
            warn_once(
                log,
                "fsdp_opt: several forwards of a unit ran before one backward: its gradients are held until that ends. "
                "If one of them was an evaluation, run it under torch.no_grad()",
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatGroup:
        """A group of its own on the same ranks; parameters copied with it stay its views."""
        twin = copy.copy(self)
        memo[id(self)] = twin
        shard = nn.Parameter(self.shard.detach().clone(), requires_grad=self.shard.requires_grad)
        memo[id(self.shard)] = shard
        twin._own(shard)
        memo.update((id(mine), theirs) for mine, theirs in zip(self.params, twin.params, strict=True))
        twin.model = copy.deepcopy(self.model, memo)
        twin.model.backwards = 0  # nothing of them is copied
        return twin


def _slice_of_shard(flat_shard: Tensor, place: Place) -> Tensor:
    start = place.offset + place.start - place.rank * place.shard_elems
    return flat_shard[start : start + place.stop - place.start] if place.stop > place.start else flat_shard[:0]
