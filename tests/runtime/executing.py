"""Plans built by hand for the tests of the native executor: kernels, a builder, one call."""

import ctypes
from collections.abc import Callable, Sequence

import pytest
import torch

from daceml_train.runtime.executor import Arena, Plan, PlanView
from daceml_train.runtime.native_build import build

F32 = torch.float32

KERNELS = """
#include <cstdint>
#include <stdexcept>
#define KERNEL extern "C" __attribute__((visibility("default"))) void
KERNEL add(void** p, const int64_t* n) {  // p[0] = p[1] + p[2]
  for (int64_t i = 0; i < n[0]; ++i) ((float*)p[0])[i] = ((float*)p[1])[i] + ((float*)p[2])[i];
}
KERNEL scale(void** p, const int64_t* n) {  // p[0] *= n[1]
  for (int64_t i = 0; i < n[0]; ++i) ((float*)p[0])[i] *= n[1];
}
KERNEL explode(void**, const int64_t*) { throw std::runtime_error("the kernel gave up"); }
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], int]:
    """The address of a kernel, by name."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "kernels.cpp").write_text(KERNELS)
    native = ctypes.CDLL(str(build(folder / "kernels.cpp", folder / "cache")))
    return lambda name: ctypes.cast(getattr(native, name), ctypes.c_void_p).value or 0


def contiguous(sizes: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.insert(0, step)
        step *= size
    return strides


class Builder:
    """A plan whose slots are numbered as they come."""

    def __init__(self, slots: int = 16, arena: Arena | None = None) -> None:
        self.plan, self.slots, self.inputs = Plan(slots, arena), 0, 0

    def next(self) -> int:
        self.slots += 1
        return self.slots - 1

    def input(self, like: torch.Tensor, mutable: bool = False) -> tuple[int, PlanView]:
        slot, layout = self.next(), (like.dtype, list(like.shape), list(like.stride()))
        self.plan.input_slot(slot, self.inputs, *layout, mutable=mutable)
        self.inputs += 1
        return slot, self.plan.view(slot, 0, *layout)

    def result(self, like: torch.Tensor) -> tuple[int, PlanView]:
        slot, layout = self.next(), (like.dtype, list(like.shape), list(like.stride()))
        self.plan.result_slot(slot, *layout)
        return slot, self.plan.view(slot, 0, *layout)

    def fresh(self, sizes: Sequence[int], dtype: torch.dtype = F32) -> tuple[int, PlanView]:
        slot = self.next()
        self.plan.fresh_slot(slot, dtype, sizes, contiguous(sizes))
        return slot, self.plan.view(slot, 0, dtype, sizes, contiguous(sizes))

    def arena(self, offset: int, sizes: Sequence[int]) -> tuple[int, PlanView]:
        slot = self.next()
        self.plan.arena_slot(slot, offset)
        return slot, self.plan.view(slot, 0, F32, sizes, contiguous(sizes))


def call_once(name: str, overload: str, arguments: Sequence, expected: Sequence[torch.Tensor | None]) -> None:
    """Runs one operator through a plan and compares all results; tensors among the arguments become inputs."""
    builder, tensors = Builder(), []

    def convert(argument):
        if isinstance(argument, torch.Tensor):
            tensors.append(argument)
            return builder.input(argument)[1]
        if isinstance(argument, list):
            return [convert(item) for item in argument]
        return argument

    converted = [convert(argument) for argument in arguments]
    slots = [None if tensor is None else builder.result(tensor)[0] for tensor in expected]
    builder.plan.call(name, overload, converted, slots, tag=1)
    builder.plan.finalize(0, [slot for slot in slots if slot is not None])
    for _ in range(2):
        outputs = builder.plan.run(tensors)
        for output, tensor in zip(outputs, (tensor for tensor in expected if tensor is not None), strict=True):
            torch.testing.assert_close(output, tensor, rtol=0, atol=0)
            assert output.stride() == tensor.stride()
            assert not output.requires_grad
