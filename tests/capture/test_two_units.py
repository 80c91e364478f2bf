"""A model of two units from capture to plan, as text; tests/capture/test_graphs.py holds the same texts in graphs/."""

from __future__ import annotations

import expecttest
import torch
from torch import Tensor, nn

import fsdp_passes as fsdp
from fsdp_passes.ir.text import dump, load
from tests.capture.dumps import dumps_of, stage_of

PRECISION = fsdp.Precision(param=torch.bfloat16, reduce=torch.float32)


class TwoUnits(nn.Module):
    """Units `up`, whose bias is shorter than the alignment, and `down`."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def train_two_steps(dump_dir: str) -> None:
    model = fsdp.shard(TwoUnits(), units=nn.Linear, precision=PRECISION)
    run = torch.compile(model, backend="fsdp_opt", options={"dump_dir": dump_dir, "verify": 2, "codegen": "fx"})
    for _ in range(2):
        run(torch.ones(4, 8, dtype=torch.bfloat16)).sum().backward()


def dumps() -> tuple[dict[str, str], dict[str, str]]:
    return dumps_of(train_two_steps)


def stage(name: str) -> str:
    return stage_of(train_two_steps, name)


class TestTexts(expecttest.TestCase):
    maxDiff = None

    def test_file_names(self) -> None:
        got = "\n".join(sorted(dumps()[0]))
        self.assertExpectedInline(
            got,
            """\
graph0.bwd.00.captured.txt
graph0.bwd.01.stride_safe_views.txt
graph0.bwd.02.one_reduction.txt
graph0.bwd.03.peel_transposes.txt
graph0.bwd.04.flat_grad_writes.txt
graph0.bwd.05.lower_reduce_grad.txt
graph0.bwd.06.late_reads.txt
graph0.bwd.07.gather_on_demand.txt
graph0.bwd.08.plan.txt
graph0.fwd.00.captured.txt
graph0.fwd.01.stride_safe_views.txt
graph0.fwd.02.late_reads.txt
graph0.fwd.03.gather_on_demand.txt
graph0.fwd.04.plan.txt
order0.txt""",
        )

    def test_captured_forward(self) -> None:
        got = stage("fwd.captured")
        self.assertExpectedInline(
            got,
            """\
   0         primals_1: f32[128] = input(shard="up")
   1         primals_2: bf16[4,8] = input()
   2         primals_3: f32[64] = input(shard="down")
   3         unshard: bf16[256] = fsdp_opt.unshard(primals_1, 2, torch.bfloat16, reduce_dtype=torch.float32)
   4         split_with_sizes: (bf16[128], bf16[16], bf16[112]) = aten.split_with_sizes(unshard, [128, 16, 112])
   5         getitem: bf16[128] = split_with_sizes[0]
   6         getitem_1: bf16[16] = split_with_sizes[1]
   7         view: bf16[16,8] = aten.view(getitem, [16, 8])
   8         view_1: bf16[16] = aten.view(getitem_1, [16])
   9         t: bf16[8,16]{1,8} = aten.t(view)
  10         addmm: bf16[4,16] = aten.addmm(view_1, primals_2, t)
  11         relu: bf16[4,16] = aten.relu(addmm)
  12         unshard_1: bf16[128] = fsdp_opt.unshard(primals_3, 2, torch.bfloat16, reduce_dtype=torch.float32)
  13         split_with_sizes_1: (bf16[128],) = aten.split_with_sizes(unshard_1, [128])
  14         getitem_3: bf16[128] = split_with_sizes_1[0]
  15         view_2: bf16[8,16] = aten.view(getitem_3, [8, 16])
  16         t_1: bf16[16,8]{1,16} = aten.t(view_2)
  17         mm: bf16[4,8] = aten.mm(relu, t_1)
  18         return (mm, primals_1, primals_2, primals_3, relu)
""",
        )

    def test_captured_backward(self) -> None:
        got = stage("bwd.captured")
        self.assertExpectedInline(
            got,
            """\
   0         primals_1: f32[128] = input(shard="up")
   1         primals_2: bf16[4,8] = input()
   2         primals_3: f32[64] = input(shard="down")
   3         relu: bf16[4,16] = input()
   4         tangents_1: bf16[4,8] = input()
   5         t_2: bf16[8,4]{1,8} = aten.t(tangents_1)
   6         mm_1: bf16[8,16] = aten.mm(t_2, relu)
   7         t_3: bf16[16,8]{1,16} = aten.t(mm_1)
   8         unshard_1: bf16[128] = fsdp_opt.unshard(primals_3, 2, torch.bfloat16, reduce_dtype=torch.float32)
   9         split_with_sizes_1: (bf16[128],) = aten.split_with_sizes(unshard_1, [128])
  10         getitem_3: bf16[128] = split_with_sizes_1[0]
  11         view_2: bf16[8,16] = aten.view(getitem_3, [8, 16])
  12         t_1: bf16[16,8]{1,16} = aten.t(view_2)
  13         t_4: bf16[8,16] = aten.t(t_1)
  14         mm_2: bf16[4,16] = aten.mm(tangents_1, t_4)
  15         t_5: bf16[8,16] = aten.t(t_3)
  16         view_3: bf16[128] = aten.view(t_5, [128])
  17         cat: bf16[128] = aten.cat([view_3])
  18         reduce_grad: f32[64] = fsdp_opt.reduce_grad(cat, primals_3, 2, reduce_dtype=torch.float32)
  19         detach: bf16[4,16] = aten.detach(relu)
  20         detach_1: bf16[4,16] = aten.detach(detach)
  21         threshold_backward: bf16[4,16] = aten.threshold_backward(mm_2, detach_1, 0)
  22         t_6: bf16[16,4]{1,16} = aten.t(threshold_backward)
  23         mm_3: bf16[16,8] = aten.mm(t_6, primals_2)
  24         t_7: bf16[8,16]{1,8} = aten.t(mm_3)
  25         sum_1: bf16[1,16] = aten.sum.dim_IntList(threshold_backward, [0], True)
  26         view_4: bf16[16] = aten.view(sum_1, [16])
  27         t_8: bf16[16,8] = aten.t(t_7)
  28         view_5: bf16[16] = aten.view(view_4, [16])
  29         view_6: bf16[128] = aten.view(t_8, [128])
  30         zeros: bf16[112] = aten.zeros([112], dtype=torch.bfloat16, layout=torch.strided, device=device("cpu"))
  31         cat_1: bf16[256] = aten.cat([view_6, view_5, zeros])
  32         reduce_grad_1: f32[128] = fsdp_opt.reduce_grad(cat_1, primals_1, 2, reduce_dtype=torch.float32)
  33         return (reduce_grad_1, None, reduce_grad)
""",
        )

    def test_forward_plan(self) -> None:
        got = stage("fwd.plan")
        self.assertExpectedInline(
            got,
            """\
plan fwd trains (primals_1, primals_2, primals_3)
peak 768 B: arena 768, stay 0, window 0, returned 0, written 0, reduced 0
   0 event   gathers after compute
   1 issue   full: bf16[256] = gather(primals_1) of "up" at 0
   2 issue   full_1: bf16[128] = gather(primals_3) of "down" at 512
   3 wait    full
   4 run     relu = region_0(full, primals_2)
   5 release full
   6 wait    full_1
   7 run     mm = region_1(relu, full_1)
   8 release full_1
   9         return (mm, primals_1, primals_2, primals_3, relu)

region_0:
   0         full: bf16[256] = input()
   1         primals_2: bf16[4,8] = input()
   2         split_with_sizes: (bf16[128], bf16[16], bf16[112]) = aten.split_with_sizes(full, [128, 16, 112])
   3         getitem_1: bf16[16] = split_with_sizes[1]
   4         view_1: bf16[16] = aten.reshape(getitem_1, [16])
   5         getitem: bf16[128] = split_with_sizes[0]
   6         view: bf16[16,8] = aten.reshape(getitem, [16, 8])
   7         t: bf16[8,16]{1,8} = aten.t(view)
   8         addmm: bf16[4,16] = aten.addmm(view_1, primals_2, t)
   9         relu: bf16[4,16] = aten.relu(addmm)
  10         return (relu,)

region_1:
   0         relu: bf16[4,16] = input()
   1         full_1: bf16[128] = input()
   2         split_with_sizes_1: (bf16[128],) = aten.split_with_sizes(full_1, [128])
   3         getitem_3: bf16[128] = split_with_sizes_1[0]
   4         view_2: bf16[8,16] = aten.reshape(getitem_3, [8, 16])
   5         t_1: bf16[16,8]{1,16} = aten.t(view_2)
   6         mm: bf16[4,8] = aten.mm(relu, t_1)
   7         return (mm,)
""",
        )

    def test_backward_plan(self) -> None:
        got = stage("bwd.plan")
        self.assertExpectedInline(
            got,
            """\
plan bwd (primals_1, primals_2, primals_3, relu, tangents_1)
peak 1792 B: arena 256, stay 0, window 0, returned 0, written 1024, reduced 512
   0 event   gathers after compute
   1 issue   full: bf16[128] = gather(primals_3) of "down" at 0
   2         grad_slice: f32[8,16] = grad_slice(primals_3, 0)
   3 run     region_0(tangents_1, relu, grad_slice)
   4 issue   reduce(primals_3, f32[128])
   5 wait    full
   6         grad_slice_1: f32[16,8] = grad_slice(primals_1, 0)
   7         grad_slice_2: f32[1,16] = grad_slice(primals_1, 1)
   8 run     region_1(tangents_1, full, relu, primals_2, grad_slice_1, grad_slice_2) drop (tangents_1, relu, primals_2)
   9 release full
  10 issue   reduce(primals_1, f32[256])
  11 wait    reduce(primals_3)
  12 wait    reduce(primals_1)
  13         return (None, None, None)

region_0:
   0         tangents_1: bf16[4,8] = input()
   1         relu: bf16[4,16] = input()
   2         grad_slice: f32[8,16] = input()
   3         t_2: bf16[8,4]{1,8} = aten.t(tangents_1)
   4         mm_1: bf16[8,16] = aten.mm(t_2, relu)
   5         grad_write = fsdp_opt.grad_write(grad_slice, mm_1)
   6         return ()

region_1:
   0         tangents_1: bf16[4,8] = input()
   1         full: bf16[128] = input()
   2         relu: bf16[4,16] = input()
   3         primals_2: bf16[4,8] = input()
   4         grad_slice_1: f32[16,8] = input()
   5         grad_slice_2: f32[1,16] = input()
   6         split_with_sizes_1: (bf16[128],) = aten.split_with_sizes(full, [128])
   7         getitem_3: bf16[128] = split_with_sizes_1[0]
   8         view_2: bf16[8,16] = aten.reshape(getitem_3, [8, 16])
   9         mm_2: bf16[4,16] = aten.mm(tangents_1, view_2)
  10         detach: bf16[4,16] = aten.detach(relu)
  11         detach_1: bf16[4,16] = aten.detach(detach)
  12         threshold_backward: bf16[4,16] = aten.threshold_backward(mm_2, detach_1, 0)
  13         t_6: bf16[16,4]{1,16} = aten.t(threshold_backward)
  14         mm_3: bf16[16,8] = aten.mm(t_6, primals_2)
  15         grad_write_1 = fsdp_opt.grad_write(grad_slice_1, mm_3)
  16         sum_1: bf16[1,16] = aten.sum.dim_IntList(threshold_backward, [0], True)
  17         grad_write_2 = fsdp_opt.grad_write(grad_slice_2, sum_1)
  18         return ()
""",
        )


def test_ranks_write_the_same_files() -> None:
    first, second = dumps()
    assert first == second
    assert first


def test_dumped_graphs_load_back() -> None:
    graphs = [text for name, text in dumps()[0].items() if name.startswith("graph") and ".plan." not in name]
    assert len(graphs) == 12
    for text in graphs:
        assert dump(load(text)) == text
