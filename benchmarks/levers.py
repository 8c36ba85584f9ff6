"""What made steps faster, by how much, and what limits each network now; for the page of `benchmarks.train`."""

from __future__ import annotations

from collections.abc import Iterator

LEVERS = (
    (
        "one arena with huge pages, no allocation in a step",
        "what stock PyTorch loses against tuned: 3 % (ViT) to 25 % (GPT-2, FCN-8s)",
    ),
    ("the update within the graph", "`training_step` over `optimize`: 1.01 (ViT) to 1.25 (DLRM)"),
    (
        "vectors of full width, divisions by constants as multiplications, prefetched cache lines",
        "EfficientNet-B0 158 to 128 ms, MLP-Mixer 721 to 683, ViT-S 463 to 439",
    ),
    ("sixteen random numbers at a time", "BERT with dropout 375 to 363 ms"),
    (
        "attention by our own kernel: keys transposed in registers, two passes over scores instead of four",
        "BERT 363 to 357 ms; ViT-S 439 to 434 where PyTorch's flash kernel ran",
    ),
    (
        "weight gradients of long sequences as matmuls",
        "WaveNet 180 to 163 ms; 4 times as fast for 512 channels, stride 2",
    ),
    (
        "convolutions with large weights as matmuls (`ConvolutionAsMatmul`)",
        "FCN-8s and ResNet-50 9 %, EfficientNet-B0 6 % less time",
    ),
    ("point convolutions with small weights as matmuls", "nothing: EfficientNet, MobileNetV2, ResNet-50 within 0.2 %"),
    (
        "oneDNN instead of MKL for matmuls, chosen by measuring each",
        "up to 2 times where MKL takes narrow vectors; on this processor within 10 % either way",
    ),
    (
        "a GEMM of our own (panels, tiles of 14 x 32 in registers)",
        "260 to 300 GF/s where MKL has 290 to 335; not used in steps. With prepacked weights, 290 to 325 with its "
        "epilogue: inference uses it",
    ),
    (
        "F(2x2, 3x3) for convolutions (`native/winograd.h`)",
        "500 to 650 GF/s in inference",
    ),
    (
        "3x3 convolutions and both gradients in tiles (`WinogradConvolution`)",
        "a convolution or gradient takes 0.5 to 0.65 of oneDNN's time; on one thread of an AMD EPYC, FCN-8s 1427 to "
        "1107 ms, Wide ResNet 1575 to 1420, ResNet-50 1196 to 1079, while other programs ran",
    ),
    (
        "resampling as one operator, where PyTorch's decompositions gather elements and scatter gradients",
        "a small U-Net with bilinear upsampling, one thread of an AMD EPYC: 212 to 108-117 ms (eager 131-134); with "
        "nearest, 103-110 to 106-111 (101-125), while other programs ran",
    ),
    (
        "vectors no wider than the registers (attention, tiles of matmuls and Winograd, random numbers, expressions)",
        "on two cores of an AMD EPYC with AVX2: BERT 1218 to 759 ms, ViT-S 2354 to 956, FCN-8s 849 to 689, Wide ResNet "
        "1349 to 1189",
    ),
    (
        "sums and updates join kernels that read the same array, however far away (`FuseSiblings`; not with `far=0`)",
        "bytes of a step: ViT-S 2557 to 2494 MB, MLP-Mixer 3236 to 3188, EfficientNet-B0 1719 to 1697, GPT-2 3671 to "
        "3646",
    ),
    ("rows of embeddings and bags by a kernel of our own", "DLRM's step 0.91 to 1.34 times PyTorch's speed"),
    ("chunked gradients (`ChunkUpdates`)", "GPT-2 1 %, BERT and FCN-8s up to 2 % less time"),
    (
        "cheap arrays rematerialized (`RematerializeCheap`), for peak memory",
        "up to half of the planned memory for 0 to 5 % of the time ([Memory](../guide/memory.md))",
    ),
    (
        "activations within the library's calls (post-ops)",
        "not for training: backward passes read what comes before them",
    ),
)
"""Lever -> what it gave, on this processor, when it was made."""
LIMITS: dict[str, str] = {
    "vit_s": "Nine tenths of the step are matmuls and attention. Matmuls run at 290 to 315 GFLOP/s of some 350 that "
    "the fastest convolutions reach here, in MKL and in oneDNN alike, attention at 160 to 190.",
    "mixer": "Four fifths are matmuls at 300 to 315 GFLOP/s. The residual stream is transposed before every second "
    "normalization, which reads it across the rows.",
    "bert": "Four fifths are matmuls at 300 to 315 GFLOP/s; Adam reads and writes 28 bytes per parameter.",
    "gpt2": "Matmuls with the 50,257 tokens of the vocabulary are half of the step.",
    "dlrm": "Six tenths of the peak memory are the tables, which every variant needs.",
    "lstm": "The peak memory is PyTorch, TorchDynamo and what they import; the step's own arrays are 9 MiB.",
}
"""Network -> what limits it now."""
MEMORY = """Peak memory of a warm ResNet-50 step, 813 MiB, is PyTorch (219), the parameters (97), modules
that TorchDynamo and
the optimizer import in eager execution, too (79), what capturing imports and leaves (57), momentum (97), what the
step was planned to take (213), and what libraries keep (51). It was 996 MiB before cheap arrays were rematerialized
(`RematerializeCheap`, 384 MiB of arrays), library calls wrote their results into the arena, and capturing left out
setuptools (4). NetworkX, which PyTorch's tracing imports, is loaded since these were measured (12).
Networks whose arrays are small compared with what is imported or trained (LSTM, DLRM) can hardly need less than every
variant."""
"""Why peak memory is what it is."""


def page() -> Iterator[str]:
    """The table of levers in Markdown."""
    yield "\n## What made steps faster\n"
    yield "Steps before and after a change, or with and without a pass; milliseconds are sums over launches."
    yield "They were measured when each change was written, and no command repeats them.\n"
    yield "| change | effect |"
    yield "|---|---|"
    for lever, gave in LEVERS:
        yield f"| {lever} | {gave} |"
    yield f"\n{MEMORY}"
