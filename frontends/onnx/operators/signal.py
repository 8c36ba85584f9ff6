"""Fourier transforms."""

from __future__ import annotations

import torch
from torch import Tensor

from daceml_train.frontends.onnx import elements
from daceml_train.frontends.onnx.host import Host, integer
from daceml_train.frontends.onnx.rules import rule


def _complex(x: Tensor) -> Tensor:
    """The last dimension of two is the real and imaginary part, of one the real part."""
    if x.shape[-1] == 2:
        whole: Tensor = torch.view_as_complex(x.contiguous())
        return whole
    real = x.squeeze(-1)
    result: Tensor = torch.complex(real, torch.zeros_like(real))
    return result


@rule("DFT", since=20, host="length axis")
def dft(x: Tensor, length: Host = None, axis: Host = None, *, inverse: int = 0, onesided: int = 0) -> Tensor:
    along = -2 if axis is None else integer(axis)
    along = along + x.dim() if along < 0 else along
    count = None if length is None else integer(length)
    if inverse and onesided:
        real_valued: Tensor = torch.fft.irfft(_complex(x), count, along)
        return real_valued.unsqueeze(-1)
    if inverse:
        return torch.view_as_real(torch.fft.ifft(_complex(x), count, along))
    if onesided:
        real = x[..., 0]
        return torch.view_as_real(torch.fft.rfft(real, count, along))
    return torch.view_as_real(torch.fft.fft(_complex(x), count, along))


@rule("DFT", since=17, host="length")
def dft_by_attribute(x: Tensor, length: Host = None, *, axis: int = 1, inverse: int = 0, onesided: int = 0) -> Tensor:
    return dft(x, length, axis, inverse=inverse, onesided=onesided)


@rule("STFT", since=17, host="step length")
def stft(x: Tensor, step: Host, window: Tensor | None = None, length: Host = None, *, onesided: int = 1) -> Tensor:
    """Frames of x [batch, time, 1 or 2], windowed and transformed: [batch, frames, bins, 2]."""
    size = integer(length) if length is not None else window.shape[0] if window is not None else x.shape[1]
    signal = _complex(x) if x.shape[-1] == 2 else x.squeeze(-1) if x.dim() == 3 else x
    frames = signal.unfold(1, size, integer(step))
    frames = frames if window is None else frames * window
    result = torch.fft.rfft(frames) if onesided and not frames.is_complex() else torch.fft.fft(frames)
    return torch.view_as_real(result)


@rule("MelWeightMatrix", since=17, host="bins length rate low high")
def mel_weight_matrix(
    bins: Host, length: Host, rate: Host, low: Host, high: Host, *, output_datatype: int = 1
) -> Tensor:
    """Triangles on the mel scale over the bins of a Fourier transform, as ONNX rounds their corners."""
    count, spectrum = integer(bins), integer(length) // 2 + 1
    ends = torch.tensor([float(integer(low)), float(integer(high))], dtype=torch.float64)
    mel = 2595 * torch.log10(1 + ends / 700)
    edges = mel[0] + torch.arange(count + 2) * ((mel[1] - mel[0]) / (count + 2))
    hertz = 700 * (10 ** (edges / 2595) - 1)
    corner = torch.floor((integer(length) + 1) * hertz / integer(rate))
    lower, center, upper = corner[:-2], corner[1:-1], corner[2:]
    at = torch.arange(spectrum, dtype=torch.float64)[:, None]
    rising = torch.where(center == lower, (at == center).double(), (at - lower) / (center - lower))
    falling = (upper - at) / (upper - center)
    inside = torch.where((at >= lower) & (at <= center), rising, torch.zeros_like(rising))
    inside = torch.where((at > center) & (at < upper), falling, inside)
    return inside.to(elements.dtype(output_datatype))
