"""The tools around the package: text, flags, results, memory counter, the demo's verdicts."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkpoints
import demo
import first_step
import pytest
import torch
import train
from corpus import SEPARATOR, VOCAB_SIZE, read_corpus, token_batches
from memory import open_meter
from parallel import process_group
from rich.console import Console

CHECKOUT = Path(__file__).resolve().parent.parent
TINY = {
    **{"layers": 1, "hidden": 32, "heads": 2, "kv-heads": 1, "intermediate": 48, "seq": 16, "batch": 2},
    **{"dtype": "fp32", "device": "cpu"},
}


@pytest.fixture(scope="module")
def meter() -> Path:
    library = demo.build_meter(Console(stderr=True))
    assert library is not None
    return library


def run_train(*flags: str, folder: Path, num_ranks: int = 1, preload: Path | None = None) -> dict[str, Any]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [sys.executable, *(launcher if num_ranks > 1 else []), str(CHECKOUT / "tools" / "train.py")]
    results = folder / "results.json"
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"LD_PRELOAD": str(preload)} if preload else {})
    command += [*(f"--{name}={value}" for name, value in TINY.items()), f"--json={results}", *flags]
    subprocess.run(command, env=environment, check=True, timeout=240)
    return json.loads(results.read_text())


# --- text -------------------------------------------------------------------------------------------


def first_batches(corpus: torch.Tensor, seed: int, rank: int) -> torch.Tensor:
    stream = token_batches(corpus, batch=3, seq=20, seed=seed, rank=rank)
    return torch.stack(list(itertools.islice(stream, 4)))


def test_corpus_is_each_file_behind_a_separator_in_the_order_of_names(tmp_path):
    (tmp_path / "b.py").write_bytes(b"\xff")
    (tmp_path / "a.py").write_bytes(b"hi")
    (tmp_path / "c.txt").write_bytes(b"no")
    assert read_corpus(tmp_path).tolist() == [SEPARATOR, ord("h"), ord("i"), SEPARATOR, 255]
    assert read_corpus(tmp_path, max_tokens=2).tolist() == [SEPARATOR, ord("h")]


def test_corpus_without_source_files_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected Python source files, got none"):
        read_corpus(tmp_path)


def test_batches_depend_on_seed_and_rank_alone():
    corpus = read_corpus()
    batches = first_batches(corpus, seed=1, rank=0)
    assert batches.shape == (4, 3, 20) and batches.dtype == torch.int64
    assert set(batches.flatten().tolist()) <= set(range(VOCAB_SIZE))
    assert torch.equal(batches, first_batches(read_corpus(), seed=1, rank=0))
    assert not torch.equal(batches, first_batches(corpus, seed=1, rank=1))
    assert not torch.equal(batches, first_batches(corpus, seed=2, rank=0))


def test_a_batch_is_a_run_of_the_text():
    batch = next(token_batches(torch.arange(100), batch=5, seq=7, seed=0, rank=0))
    assert torch.equal(batch, batch[:, :1] + torch.arange(7))
    with pytest.raises(ValueError, match="expected fewer than the corpus's 7 tokens, got 7"):
        next(token_batches(torch.arange(7), batch=5, seq=7, seed=0, rank=0))


# --- flags ------------------------------------------------------------------------------------------


def test_options_are_python_literals_or_strings():
    flags = train.parse_flags(["--options", "grad_path=cat", "verify=2", "in_flight=None", "--dump", "d"])
    assert flags.backend == "fsdp_opt"
    assert flags.options == {"grad_path": "cat", "verify": 2, "in_flight": None, "dump_dir": "d"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--options verify", "expected key=value, got 'verify'"),
        ("--backend fsdp2 --options verify=2", "expected --backend fsdp_opt, got fsdp2"),
        ("--backend none --dump d", "expected --backend fsdp_opt, got none"),
        ("--backend fsdp2 --by-block", "expected --backend fsdp_opt, got fsdp2"),
        ("--steps 0", "expected at least 1, got 0"),
        ("--backend ddp", "invalid choice: 'ddp'"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit):
        train.parse_flags(flags.split())
    assert message in capsys.readouterr().err


# --- results ----------------------------------------------------------------------------------------


def test_results_of_a_run(tmp_path, meter):
    results = run_train("--backend", "none", "--steps", "2", preload=meter, folder=tmp_path)
    assert list(results) == [
        "backend",
        "world_size",
        "num_params",
        "losses",
        "step_s",
        "cpu_s",
        "tokens_per_s",
        "model_tflops",
        "mfu",
        "compile_s",
        "peak_bytes",
        "rest_bytes",
        "held_out",
    ]
    embeddings, norms, attention, mlp = 2 * VOCAB_SIZE * 32, 3 * 32, 3 * 32 * 32, 3 * 32 * 48
    assert results["num_params"] == embeddings + norms + attention + mlp
    assert (results["backend"], results["world_size"], results["mfu"]) == ("none", 1, None)
    assert len(results["losses"]) == 2 and results["losses"][1] < results["losses"][0] < 6
    assert results["tokens_per_s"] == pytest.approx(2 * 2 * 16 / results["step_s"])
    # AdamW rests on the embedding and head (each over the counter's 16 KiB) and two moments of them.
    assert results["peak_bytes"] > results["rest_bytes"] > 3 * 4 * embeddings


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsdp_opt", "fsdp2", "fsdp1"])
def test_every_backend_computes_what_plain_data_parallel_does(backend, tmp_path):
    flags = ("--steps", "4", "--microbatches", "3", "--checkpoint")
    expected = run_train("--backend", "none", *flags, num_ranks=2, folder=tmp_path)
    results = run_train("--backend", backend, *flags, num_ranks=2, folder=tmp_path)
    assert results["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert results["num_params"] == expected["num_params"]


# --- checkpoints ------------------------------------------------------------------------------------


def test_a_run_goes_on_where_it_was(tmp_path):
    """From its second save: the third was cut off before its end, and a fourth has just begun."""
    runs = tmp_path / "runs"
    flags = ("--steps=6", "--warmup=2", "--decay", "--eval-every=2", "--options", "codegen=fx")
    whole = run_train(*flags, f"--save={runs}", "--save-every=2", folder=tmp_path, num_ranks=2)
    (runs / "step_6" / ".metadata").unlink()
    (runs / "step_10").mkdir()
    rest = run_train(*flags, f"--resume={runs}", folder=tmp_path, num_ranks=2)
    assert rest["losses"] == whole["losses"][4:]
    assert list(whole["held_out"]) == ["2", "4", "6"]
    assert rest["held_out"] == {"6": whole["held_out"]["6"]}


@pytest.mark.slow
@pytest.mark.parametrize("then", ["none", "fsdp2", "fsdp1"])
def test_a_run_goes_on_with_another_backend(then, tmp_path):
    flags = ("--steps=4", f"--save={tmp_path}", "--save-every=2")
    whole = run_train("--backend=fsdp_opt", *flags, folder=tmp_path, num_ranks=2)
    (tmp_path / "step_4" / ".metadata").unlink()
    rest = run_train(f"--backend={then}", "--steps=4", f"--resume={tmp_path}", folder=tmp_path, num_ranks=2)
    assert rest["losses"] == pytest.approx(whole["losses"][2:], abs=1e-5)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    error = pytest.raises(FileNotFoundError, match=r"--resume: expected a checkpoint step_<n> in .*, got none")
    with process_group("cpu"), error:
        checkpoints.load_newest(tmp_path, {})


def test_the_learning_rate_rises_and_falls():
    flags = train.parse_flags(["--warmup", "3", "--decay", "--steps", "13"])
    factors = [train.lr_factor(step, flags) for step in range(14)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[3:] == sorted(factors[3:], reverse=True)
    assert factors[13] == pytest.approx(0.1)
    assert train.lr_factor(5, train.parse_flags([])) == 1.0


# --- memory -----------------------------------------------------------------------------------------

COUNT = """
import ctypes, threading
import torch
from memory import open_meter
from parallel import process_group

libc = ctypes.CDLL(None)
for name in ("malloc", "calloc", "realloc", "reallocarray", "aligned_alloc", "valloc", "pvalloc"):
    getattr(libc, name).restype = ctypes.c_void_p
libc.malloc_usable_size.restype = ctypes.c_size_t
meter = open_meter(torch.device("cpu"))
size, big = ctypes.c_size_t, 3_000_001

def usable(block): return libc.malloc_usable_size(ctypes.c_void_p(block))
def free(block): libc.free(ctypes.c_void_p(block))
def aligned():
    block = ctypes.c_void_p()
    assert libc.posix_memalign(ctypes.byref(block), size(64), size(big)) == 0
    return block.value

ways = dict(
    malloc=lambda: libc.malloc(size(big)),
    calloc=lambda: libc.calloc(size(1), size(big)),
    aligned_alloc=lambda: libc.aligned_alloc(size(64), size(big)),
    posix_memalign=aligned,
    grown=lambda: libc.realloc(ctypes.c_void_p(libc.malloc(size(big // 2))), size(big)),
    shrunk=lambda: libc.realloc(ctypes.c_void_p(libc.malloc(size(big * 9))), size(big)),
    reallocarray=lambda: libc.reallocarray(None, size(1), size(big)),
    valloc=lambda: libc.valloc(size(big)),
    pvalloc=lambda: libc.pvalloc(size(big)),
)
for name, allocate in ways.items():
    before = meter.live_bytes()
    block = allocate()
    grown = meter.live_bytes() - before
    assert grown == usable(block) >= big and grown < big + 8192, (name, grown, usable(block))
    other = threading.Thread(target=free, args=(block,))
    other.start(); other.join()
    assert meter.live_bytes() == before, (name, meter.live_bytes() - before)

small = libc.malloc(size(16000))
assert meter.live_bytes() == before
meter.reset_peak()
assert meter.peak_bytes() == before
block = libc.malloc(size(big)); counted = usable(block); free(block)
assert meter.peak_bytes() == before + counted and meter.live_bytes() == before
tensor = torch.empty(2**20)
assert 0 <= meter.live_bytes() - before - 2**22 < 8192
print("counted")
"""


def test_meter_counts_known_allocations_exactly(meter):
    environment = os.environ | {"LD_PRELOAD": str(meter), "PYTHONPATH": str(CHECKOUT / "tools")}
    done = subprocess.run([sys.executable, "-c", COUNT], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("counted\n", "")


@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="the counter may be preloaded")
def test_without_the_counter_nothing_is_measured():
    absent = open_meter(torch.device("cpu"))
    absent.reset_peak()
    assert (absent.live_bytes(), absent.peak_bytes()) == (None, None)


# --- demo -------------------------------------------------------------------------------------------


def result(backend: str, *losses: float) -> demo.Result:
    costs = dict.fromkeys(("step_s", "cpu_s", "tokens_per_s", "compile_s"), 1.0)
    costs |= {"num_params": 7, "peak_bytes": 2**20, "rest_bytes": None}
    return {"backend": backend, "losses": losses} | costs


@pytest.mark.parametrize(
    ("left", "right", "kept"),
    [
        ((5.0, 4.5, 3.9), (5.0, 4.49, 3.9), [True, True, True]),
        ((5.0, 4.5, 4.1), (5.0, 4.5, 4.1), [False, False, True]),
        ((5.0, 4.5, 3.9), (5.0, 4.52, 3.9), [True, True, False]),
        ((5.0, float("nan"), 3.9), (5.0, 4.5, 3.9), [True, True, False]),
    ],
)
def test_demo_states_what_held(left, right, kept):
    table, promises = demo.compare(result("fsdp_opt", *left), result("fsdp2", *right))
    assert [held for held, _ in promises] == kept
    assert [column.header for column in table.columns] == ["", "fsdp_opt", "fsdp2"]


def test_demo_shows_first_and_last_step():
    assert demo._shown_steps(1) == [0]
    assert demo._shown_steps(3) == [0, 1, 2]
    assert demo._shown_steps(30) == [0, 6, 12, 17, 23, 29]


# --- first step -------------------------------------------------------------------------------------


def test_phases_inside_of_phases_are_counted_once(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    monkeypatch.setattr(first_step, "cpu_seconds", lambda: next(now))
    clock = first_step.PhaseClock()
    inner = clock.timed("Inductor", lambda x: x + 1)
    assert clock.timed("passes", inner)(1) == 2
    clock.switch("Dynamo")
    assert clock.spent == {"Dynamo": 1.0 + 5.0, "AOTAutograd": 0.0, "passes": 2.0 + 4.0, "Inductor": 3.0}


@pytest.mark.slow
def test_the_first_step_is_split_into_phases(tmp_path):
    """A second process finds on disk what the first compiled."""
    flags = [f"--{name}={value}" for name, value in TINY.items() if name not in ("layers", "device")]
    cold, warm = (first_step.run(1, str(tmp_path), flags) for _ in range(2))
    assert cold["regions"] == warm["regions"] >= cold["regions_compiled"] == warm["regions_compiled"] > 4
    assert min(cold["spent"].values()) > 0
    assert (cold["from_disk"], warm["from_disk"]) == (0, warm["regions_compiled"])
    assert first_step.table_of([(1, "cold", cold), (1, "warm", warm)]).row_count == 2


@pytest.mark.slow
def test_block_by_block_each_block_is_captured_once(tmp_path):
    flags = [f"--{name}={value}" for name, value in TINY.items() if name not in ("layers", "device")]
    few, many = (first_step.run(n, str(tmp_path), [*flags, "--by-block"]) for n in (2, 4))
    assert few["regions"] == many["regions"] > 0
