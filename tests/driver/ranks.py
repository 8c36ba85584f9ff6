"""Processes of `torch.distributed` for tests: two that stay, and run one function after the other.

They are forked from one process that has imported what they need, which takes longer than most tests.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE = 150
"""Seconds after which a collective without its partners, and a process without an answer, is an error."""


IMPORTED = [
    "daceml_train.driver",
    "daceml_train.reporting",
    "torch._functorch.aot_autograd",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
]
"""What processes have when they begin."""

GONE = "gone"
"""The answer of a rank whose process has ended."""


class RankFailed(AssertionError):
    """A function raised on a rank."""


class Ranks:
    """`world` processes in one group of gloo. Functions are found by name, so they stand at the top of a module."""

    def __init__(self, folder: Path, world: int = 2, patience: int = PATIENCE) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (rank, world, f"file://{folder}/store", theirs, patience)
            self.processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self.processes[-1].start()
            theirs.close()
            self.pipes.append(ours)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(rank, *arguments)` returns on each rank."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(PATIENCE), f"rank {rank} does not answer {function.__name__}"
            try:
                answers.append(pipe.recv())
            except EOFError:
                answers.append((False, GONE))
        for rank, (failed, answer) in enumerate(answers):
            if failed:
                raise RankFailed(f"rank {rank} of {function.__name__}:\n{answer}")
        return [answer for _, answer in answers]

    def close(self) -> None:
        """End the processes."""
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            pipe.close()
            process.join(5)
            if process.is_alive():
                process.kill()


def _serve(rank: int, world: int, store: str, pipe: Any, patience: int) -> None:
    import torch
    import torch.distributed as dist

    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world)
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=patience)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timeout)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            pipe.send((False, function(rank, *arguments)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))
