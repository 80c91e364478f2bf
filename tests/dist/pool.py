"""Run a function on real gloo ranks: `run(2, fn, *args)` returns the results in rank order.

The processes of a world size are started once and reused, because starting torch costs seconds. A rank that
raises or hangs fails the call and discards its pool; the next call starts a fresh one.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import gc
import multiprocessing as mp
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

START_TIMEOUT_S = 300


class RankError(AssertionError):
    """A rank raised, died or hung; the message holds its traceback."""


def run(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 300, leaving: int = -1) -> list[Any]:
    """Results of module-level `fn(*args)` on `world_size` ranks, in rank order; all picklable.

    leaving: a rank whose process ends in `fn`; its result is None, and the pool is discarded.
    RankError: the first rank to fail, with its traceback, or those that did not answer in `timeout` seconds.
    """
    pools = _pools()
    if world_size not in pools:
        pools[world_size] = _Pool(world_size)
    try:
        results = pools[world_size].call(fn, args, timeout, leaving)
    except BaseException:
        pools.pop(world_size).kill()
        raise
    if leaving >= 0:
        pools.pop(world_size).kill()
    return results


@functools.cache
def _pools() -> dict[int, _Pool]:
    """The running pools of this process, by world size."""
    return {}


class _Pool:
    def __init__(self, world_size: int) -> None:
        # The parent hosts the store: the port is free by construction, and dies with the parent.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        # libgomp reads it when torch is loaded, before a rank's own code runs.
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
            for rank in range(world_size):
                self._start(rank, world_size)
        for rank in range(world_size):
            self._wait_until_ready(rank)

    def _start(self, rank: int, world_size: int) -> None:
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, rank, world_size, self._store.port), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        self._pipes.append(ours)

    def _wait_until_ready(self, rank: int) -> None:
        """Starting is not part of a call's timeout."""
        if not self._pipes[rank].poll(START_TIMEOUT_S):
            self.kill()
            raise RankError(f"rank {rank} did not start in {START_TIMEOUT_S} s")
        self._receive(rank)

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float, leaving: int) -> list[Any]:
        request = pickle.dumps((sys.path, pickle.dumps((fn, args))))
        for rank, pipe in enumerate(self._pipes):
            self._send(rank, pipe, request)
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        while len(results) < len(self._pipes):
            waiting = [rank for rank in range(len(self._pipes)) if rank not in results]
            ready = connection.wait([self._pipes[rank] for rank in waiting], deadline - time.monotonic())
            if not ready:
                self._show_stacks(waiting)
                raise RankError(f"no answer in {timeout:g} s from rank {', '.join(map(str, waiting))}")
            for rank in waiting:
                if self._pipes[rank] in ready:
                    results[rank] = self._receive(rank, leaving)
        return [results[rank] for rank in range(len(self._pipes))]

    def _send(self, rank: int, pipe: Connection, request: bytes) -> None:
        try:
            pipe.send_bytes(request)
        except OSError as broken:
            raise RankError(f"rank {rank} was gone before the call") from broken

    def _receive(self, rank: int, leaving: int = -1) -> Any:
        try:
            error, result = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            if rank == leaving:
                return None
            self._processes[rank].join(timeout=5)
            raise RankError(f"rank {rank} died with exit code {self._processes[rank].exitcode}") from None
        if error is not None:
            raise RankError(f"rank {rank} raised\n{error}")
        return result

    def _show_stacks(self, ranks: list[int]) -> None:
        """Let hanging ranks print where they are to stderr."""
        for rank in ranks:
            pid = self._processes[rank].pid
            if pid is not None and self._processes[rank].is_alive():
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join(timeout=5)
            pipe.close()


def _serve(pipe: Connection, rank: int, world_size: int, port: int) -> None:
    """The life of a rank: answer calls until the parent is gone."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    forever = datetime.timedelta(hours=1)  # the caller's timeout is the one that counts
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=forever)
    with contextlib.suppress(EOFError):
        pipe.send_bytes(pickle.dumps((None, rank)))
        while True:
            pipe.send_bytes(_answer(pipe.recv_bytes()))


def _die_with_parent() -> None:
    """A rank that waits in a collective does not see its pipe close."""
    parent = mp.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _answer(request: bytes) -> bytes:
    try:
        sys.path[:], call = pickle.loads(request)  # test modules are found as the parent finds them
        fn, args = pickle.loads(call)
        _reset()
        return pickle.dumps((None, fn(*args)))
    except BaseException:  # pytest's failures are no Exceptions
        return pickle.dumps((traceback.format_exc(), None))


def _reset() -> None:
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    gc.freeze()  # what is left, of torch mostly, is not looked at again
