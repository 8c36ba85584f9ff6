"""Boxes and regions of interest."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from daceml_train.frontends.onnx.host import Host, integer
from daceml_train.frontends.onnx.rules import rule


@rule("NonMaxSuppression", since=10, host="most overlap least")
def non_max_suppression(
    boxes: Tensor,
    scores: Tensor,
    most: Host = None,
    overlap: Host = None,
    least: Host = None,
    *,
    center_point_box: int = 0,
) -> Tensor:
    """Per batch entry and class the best boxes, of those that overlap a better one none: [selected, 3] indices."""
    limit = 0 if most is None else integer(most)
    threshold = 0.0 if overlap is None else float(integer(overlap))
    selected: list[list[int]] = []
    if center_point_box:
        x, y, w, h = boxes.unbind(-1)
        low, high = torch.stack([y - h / 2, x - w / 2], -1), torch.stack([y + h / 2, x + w / 2], -1)
    else:
        low, high = torch.minimum(boxes[..., :2], boxes[..., 2:]), torch.maximum(boxes[..., :2], boxes[..., 2:])
    for entry in range(boxes.shape[0]):
        area = (high[entry] - low[entry]).prod(-1)
        inner = torch.minimum(high[entry][:, None], high[entry]) - torch.maximum(low[entry][:, None], low[entry])
        common = inner.clamp(min=0).prod(-1)
        union = area[:, None] + area - common
        near = (torch.where(union > 0, common / union, torch.zeros_like(common)) > threshold).tolist()
        for kind in range(scores.shape[1]):
            score = scores[entry, kind]
            kept: list[int] = []
            for box in torch.sort(score, descending=True, stable=True).indices.tolist():
                if len(kept) == limit:
                    break
                if least is not None and float(score[box]) <= float(integer(least)):
                    break
                if not any(near[box][other] for other in kept):
                    kept.append(box)
            selected += [[entry, kind, box] for box in kept]
    return torch.tensor(selected, dtype=torch.int64).reshape(-1, 3)


@rule("RoiAlign", since=10)
def roi_align(
    x: Tensor,
    rois: Tensor,
    entries: Tensor,
    *,
    coordinate_transformation_mode: str | None = None,
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
    opset: int,
) -> Tensor:
    """Bilinear samples in each cell of a region (He et al., Mask R-CNN, 2017), averaged, or the greatest."""
    usual = "half_pixel" if opset >= 16 else "output_half_pixel"
    half = (coordinate_transformation_mode or usual) == "half_pixel"
    results = []
    for region, entry in zip(rois.unbind(0), entries.unbind(0), strict=True):
        left, top, right, bottom = (region * spatial_scale - (0.5 if half else 0.0)).unbind(0)
        width, height = right - left, bottom - top
        if not half:
            width, height = width.clamp(min=1.0), height.clamp(min=1.0)
        rows = sampling_ratio or math.ceil(float(height) / output_height)
        columns = sampling_ratio or math.ceil(float(width) / output_width)
        y = top + (torch.arange(output_height * rows) + 0.5) * (height / (output_height * rows))
        z = left + (torch.arange(output_width * columns) + 0.5) * (width / (output_width * columns))
        image = x.index_select(0, entry.reshape(1).long())[0]
        corners = _corners(image, y, z)
        cells = [part.reshape(-1, output_height, rows, output_width, columns) for part in corners]
        if mode == "max":
            results.append(torch.stack(cells).amax(0).amax((2, 4)))
        else:
            results.append(sum(cells[1:], cells[0]).mean((2, 4)))
    return torch.stack(results) if results else x.new_zeros(0, x.shape[1], output_height, output_width)


def _corners(image: Tensor, y: Tensor, x: Tensor) -> list[Tensor]:
    """The four weighted neighbors of each sample: [channels, rows, columns] each. Far outside, all are zero."""
    height, width = image.shape[1:]
    inside = ((y >= -1) & (y <= height))[:, None] & ((x >= -1) & (x <= width))[None, :]
    (y0, y1, wy), (x0, x1, wx) = _neighbors(y, height), _neighbors(x, width)
    parts = []
    for rows, row_weight in ((y0, 1 - wy), (y1, wy)):
        for columns, column_weight in ((x0, 1 - wx), (x1, wx)):
            value = image.index_select(1, rows).index_select(2, columns)
            parts.append(torch.where(inside, value * row_weight[:, None] * column_weight[None, :], 0.0))
    return parts


def _neighbors(place: Tensor, extent: int) -> tuple[Tensor, Tensor, Tensor]:
    place = place.clamp(min=0)
    first = place.floor().clamp(max=extent - 1)
    weight = torch.where(first >= extent - 1, torch.zeros_like(place), place - first)
    return first.long(), (first + 1).clamp(max=extent - 1).long(), weight
