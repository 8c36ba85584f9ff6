"""Machine code of the twelve networks' kernels on GPUs: registers, spills, and the width of accesses; nothing runs.

    python -m benchmarks.gpu_code [NETWORK...] [--precision P] [--architecture A] [--json FILE] [--show]

Each network's step is lowered for an H100. nvcc compiles every kernel for each architecture, ptxas says how many
registers a kernel takes and what it spills, and nvdisasm (`pip install 'daceml_train[gpu]'`) shows its loads and
stores. Counted are the kernels that a step launches where all pointers are aligned. A launch of more than 1 MB is
expected to give each multiprocessor 512 threads, unless a row belongs to one team (`rows`), a thread sums all rows
(`lanes`), or each thread has one access (`elements`).
`python -m benchmarks.gpu_code --page > docs/results/gpu-code.md` prints the page from the JSON file.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch._dynamo

import daceml_train as dt
from benchmarks.networks import TWELVE
from benchmarks.networks.network import Network
from benchmarks.train import ROOT, surroundings
from daceml_train.analysis.device_model import FULL_THREADS, device_model
from daceml_train.codegen.cuda.compile import find_nvcc, find_tool, nvcc_version, run_nvcc, text
from daceml_train.codegen.cuda.launch import CudaCode, CudaPart, whole_of
from daceml_train.driver.compile import Compiled, Lowered
from daceml_train.frontends.torch.capture.eager_operations import prepared
from daceml_train.lowering.device_time import Operation, operations_of
from daceml_train.lowering.program import KernelLaunch
from daceml_train.reporting.prediction import known_size
from daceml_train.runtime.gpu.absent import AbsentGPU
from daceml_train.runtime.gpu.toolchain import TOGETHER
from daceml_train.runtime.placement import device_override

RESULTS = ROOT / "benchmarks" / "results" / "gpu_code.json"
ARCHITECTURES = ("sm_80", "sm_90", "sm_120")
PRECISIONS = ("float32", "bfloat16")
MOST_REGISTERS = 128
"""With more, fewer than 512 threads fit into a multiprocessor's 65,536 registers."""
LARGE = 1 << 20
"""Bytes of a launch that is to fill the device."""
FRAGMENT = 16
"""Bytes of the widest access. ptxas 13 sometimes stores one index and loads it once; less than this is no spill."""


@dataclass(frozen=True)
class Function:
    """One kernel of a launch, as machine code."""

    name: str
    registers: int
    spilled: int
    """Bytes of spill stores and loads."""
    accesses: dict[str, int]
    """Instructions per kind and width: `LDG.128`, `STG.32`."""

    @property
    def wide(self) -> int:
        """Loads and stores of 16 bytes."""
        return self.accesses.get("LDG.128", 0) + self.accesses.get("STG.128", 0)


@dataclass(frozen=True)
class Launched:
    """A launch of a kernel in a step."""

    code: CudaCode
    operation: Operation
    limit: str
    """What keeps it below 512 threads per multiprocessor; empty if nothing does."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, count and print, or print the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_code", description=__doc__)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"of {', '.join(TWELVE)} (default: all)")
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="default: both")
    parser.add_argument("--architecture", action="append", metavar="sm_N", help=f"default: {', '.join(ARCHITECTURES)}")
    parser.add_argument("--small", action="store_true", help="the networks' small sizes")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"put the figures there; the page's: {RESULTS}")
    parser.add_argument("--show", action="store_true", help="name the kernels that fall short")
    parser.add_argument("--page", action="store_true", help="print the page from the figures that are there")
    options = parser.parse_args(arguments)
    if options.page:
        print("\n".join(page(json.loads(RESULTS.read_text(encoding="utf-8")))))
        return 0
    if unknown := [name for name in options.networks if name not in TWELVE]:
        parser.error(f"no network is called {unknown[0]!r}; known: {', '.join(TWELVE)}")
    warnings.simplefilter("ignore")
    known: dict[tuple[str, str], list[Function]] = {}
    rows: list[dict[str, Any]] = []
    for precision in options.precision or PRECISIONS:
        for name in options.networks or TWELVE:
            launched = launches(TWELVE[name], precision == "bfloat16", options.small)
            for architecture in options.architecture or ARCHITECTURES:
                compile_new([each.code for each in launched], architecture, known)
                found = {each.code.key: known[each.code.key, architecture] for each in launched}
                rows.append({"network": name, "precision": precision, "architecture": architecture})
                rows[-1] |= counted(launched, found)
                print(line(rows[-1]), flush=True)
                if options.show:
                    print(*short(launched, found), sep="", end="", flush=True)
            if options.json:
                kept = {k: v for k, v in surroundings().items() if k in ("date", "versions")} | {"compiler": compiler()}
                options.json.write_text(json.dumps(kept | {"rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


def compiler() -> str:
    """The nvcc that compiles."""
    return "nvcc " + ".".join(map(str, nvcc_version(find_nvcc())))


def launches(network: Network, autocast: bool = False, small: bool = False) -> list[Launched]:
    """The kernels that a network's second step launches on an H100, whose optimizer has its state."""
    torch._dynamo.reset()
    problem = network.build(small=small)
    if autocast:
        problem = problem.autocast()
    prepared(problem.optimizer)
    model = device_model("h100")
    with TemporaryDirectory() as folder, device_override(lambda device: AbsentGPU(model)):
        step = dt.training_step(problem.model, problem.loss, problem.optimizer, cache=folder)
        try:
            step(problem.inputs, problem.targets)
        except Lowered as lowered:
            return [*_launched(lowered.compiled, model.processors)]
    raise RuntimeError(f"the step was not compiled: {step.breaks}")


def _launched(compiled: Compiled, processors: int) -> Iterator[Launched]:
    for program, record in zip(compiled.programs, compiled.records, strict=True):
        operations = operations_of(program, record.costs, known_size, processors)
        for launch, operation in zip(program.launches, operations, strict=True):
            if isinstance(launch, KernelLaunch):
                code = program.codes[launch.code]
                assert isinstance(code, CudaCode | CudaPart)
                second = isinstance(code, CudaPart) and code.number
                limit = "" if second else whole_of(code).limit(known_size, processors)
                yield Launched(whole_of(code), operation, limit)


def compile_new(codes: Iterable[CudaCode], architecture: str, known: dict[tuple[str, str], list[Function]]) -> None:
    """Compile kernels for an architecture, unless they are known."""
    new = [*{code.key: code for code in codes if (code.key, architecture) not in known}.values()]
    for start in range(0, len(new), TOGETHER):
        part = new[start : start + TOGETHER]
        for key, functions in compiled(part, architecture).items():
            known[key, architecture] = functions


def compiled(codes: Sequence[CudaCode], architecture: str) -> dict[str, list[Function]]:
    """Key of a kernel -> what its launches are as machine code, where all pointers are aligned."""
    with TemporaryDirectory() as folder:
        source, library = Path(folder) / "kernels.cu", Path(folder) / "kernels.cubin"
        source.write_text(text(codes))
        options = ["-cubin", "-Xptxas=-v", str(source), "-o", str(library)]
        said, bodies = resources(run_nvcc(find_nvcc(), options, architecture)), machine_code(library)
    found: dict[str, dict[str, Function]] = {code.key: {} for code in codes}
    for name, (registers, spilled) in sorted(said.items()):  # of two forms, the second one has wide accesses
        key, kernel = _parts(name)
        found[key][kernel] = Function(kernel, registers, spilled, _accesses(bodies[name]))
    return {key: [*functions.values()] for key, functions in found.items()}


def _parts(mangled: str) -> tuple[str, str]:
    """The key and the name of a kernel, `k_<key>::<name>`."""
    parts, rest = [], mangled.removeprefix("_ZN")
    while len(parts) < 2 and (size := re.match(r"\d+", rest)):
        start = len(size[0])
        parts.append(rest[start : start + int(size[0])])
        rest = rest[start + int(size[0]) :]
    return parts[0].removeprefix("k_"), parts[1]


def resources(message: str) -> dict[str, tuple[int, int]]:
    """Kernel -> its registers, and the bytes that it spills, from what `ptxas -v` says."""
    pattern = (
        r"Compiling entry function '(\w+)'.*?Function properties for \1\s+"
        r".*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
    )
    found = re.findall(pattern, message, re.DOTALL)
    return {name: (int(registers), int(stores) + int(loads)) for name, stores, loads, registers in found}


def machine_code(path: Path) -> dict[str, list[str]]:
    """Kernel -> its instructions, without predicates."""
    tool = find_tool("nvdisasm")
    if tool is None:
        raise RuntimeError("no nvdisasm was found: pip install 'daceml_train[gpu]'")
    run = subprocess.run([str(tool), "-c", str(path)], capture_output=True, text=True, check=True)
    functions: dict[str, list[str]] = {}
    for each in run.stdout.splitlines():
        if found := re.match(r"\s*\.section\s+\.text\.(\w+)", each):
            body = functions.setdefault(found[1], [])
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w[^;]*);", each):
            body.append(found[1])
    return functions


def _accesses(body: Sequence[str]) -> dict[str, int]:
    """Instructions per kind and width in bits."""
    found: Counter[str] = Counter()
    for instruction in body:
        if access := re.match(r"(LDG|STG)([.A-Z0-9]*)", instruction):
            width = re.search(r"\.(128|64|[US]?16|[US]?8)(?=\.|$)", access[2])
            found[f"{access[1]}.{width[1].lstrip('US') if width else '32'}"] += 1
    return dict(found)


def counted(launched: Sequence[Launched], found: Mapping[str, Sequence[Function]]) -> dict[str, Any]:
    """The figures of a network."""
    functions = [function for each in found.values() for function in each]
    large = [each for each in launched if each.operation.bytes > LARGE]
    narrow = [each for each in large if not any(function.wide for function in found[each.code.key])]
    return {
        "kernels": len(functions),
        "registers": max(function.registers for function in functions),
        "many_registers": sum(function.registers > MOST_REGISTERS for function in functions),
        "spilling": sum(function.spilled >= FRAGMENT for function in functions),
        "large": len(large),
        "narrow": len(narrow),
        "narrow_bytes": sum(each.operation.bytes for each in narrow) / sum(e.operation.bytes for e in launched),
        "limits": dict(Counter(each.limit for each in large if each.limit)),
    }


def line(row: Mapping[str, Any]) -> str:
    """The figures of a network in one line."""
    limits = ", ".join(f"{count} {why}" for why, count in row["limits"].items()) or "none"
    return (
        f"{row['network']:16} {row['precision']:8} {row['architecture']:6} {row['kernels']:4} kernels, at most "
        f"{row['registers']:3} registers ({row['many_registers']} above {MOST_REGISTERS}), {row['spilling']} spill; "
        f"{row['large']:3} large launches, {row['narrow']} without 16-byte accesses "
        f"({100 * row['narrow_bytes']:.1f} % of all bytes), below {FULL_THREADS} threads: {limits}"
    )


def short(launched: Sequence[Launched], found: Mapping[str, Sequence[Function]]) -> Iterator[str]:
    """Kernels that fall short, a line each."""
    for one in {each.code.key: each for each in launched}.values():
        for function in found[one.code.key]:
            if function.registers > MOST_REGISTERS or function.spilled >= FRAGMENT:
                yield f"    {one.operation.name} [{one.code.shape}] {function}\n"
    for each in {each.code.key: each for each in launched if each.operation.bytes > LARGE}.values():
        if each.limit or not any(function.wide for function in found[each.code.key]):
            o, accesses = each.operation, [f.accesses for f in found[each.code.key]]
            yield f"    {o.bytes / 1e6:7.2f} MB {o.name} [{each.code.shape}] {each.limit} {accesses}\n"


HEAD = f"""# Machine code of GPU kernels

Generated; do not edit. To compile again:

    .venv/bin/python -m benchmarks.gpu_code --json benchmarks/results/gpu_code.json
    .venv/bin/python -m benchmarks.gpu_code --page > docs/results/gpu-code.md

**Nothing on this page has run on a GPU.** The step of each network is lowered for an H100, and nvcc compiles its
kernels for three architectures. Counted are the kernels that a step launches where all pointers are aligned.
*Registers* are those of the kernel that takes most, in brackets how many kernels take more than {MOST_REGISTERS},
with which fewer than 512 threads fit into a multiprocessor. *Spilling* kernels, per architecture, store
{FRAGMENT} bytes or more that do not fit into registers. *Large* launches touch more than 1 MB. *Narrow* ones have
no access of 16 bytes, with their share of the bytes of all kernels: most transpose through shared memory, 32 by 32
elements at a time, as the update of a weight does whose gradient has another layout. A large launch is to give each
of 132 multiprocessors {FULL_THREADS} threads; *below* counts those with fewer by what limits them: a row belongs to
one team, a thread sums all rows (lanes), or each thread has one access (elements).
"""


def page(results: Mapping[str, Any]) -> Iterator[str]:
    """The page line by line."""
    yield HEAD
    rows = results["rows"]
    for precision in dict.fromkeys(r["precision"] for r in rows):
        found = [r for r in rows if r["precision"] == precision]
        architectures = [*dict.fromkeys(r["architecture"] for r in found)]
        yield f"## {precision}\n"
        columns = [f"registers, {a}" for a in architectures]
        yield f"| network | kernels | {' | '.join(columns)} | spilling | large | narrow | below |"
        yield "|---|" + "---|" * (len(architectures) + 5)
        for name in dict.fromkeys(r["network"] for r in found):
            of = {r["architecture"]: r for r in found if r["network"] == name}
            first = of[architectures[0]]
            registers = [f"{of[a]['registers']} ({of[a]['many_registers']})" for a in architectures]
            spilling = ", ".join(str(of[a]["spilling"]) for a in architectures)
            narrow = f"{first['narrow']} ({100 * first['narrow_bytes']:.0f} %)"
            below = ", ".join(f"{count} {why}" for why, count in first["limits"].items()) or "none"
            cells = [name, first["kernels"], *registers, spilling, first["large"], narrow, below]
            yield f"| {' | '.join(map(str, cells))} |"
        yield ""
    versions = results["versions"]
    yield f"Compiled {results['date']}; {results['compiler']}, torch {versions['torch']}."


if __name__ == "__main__":
    sys.exit(main())
