# ruff: noqa: E501
"""Statements of random models whose attributes are expressions over sizes, or whose sizes depend on arguments."""

SIZES = (
    "F.pad(h, (0, 0) * (h.dim() - 1) + (0, 9 - h.shape[0]))",
    "F.pad(h, (0, 0) * (h.dim() - 1) + (3 - h.shape[0], 1))",
    "F.pad(h, (0, (-h.shape[-1]) % 4))",
    "F.pad(h, (0, 0) * (h.dim() - 1) + ((4 - h.shape[0] % 4) % 4, 0))",
    "F.pad(h, (8 - h.shape[-1], 1), value=0.5)",
    "h[h.shape[0] - 3:]",
    "h[2 - h.shape[0]:]",
    "h[:h.shape[0] - 2]",
    "h[..., h.shape[-1] // 2 - 1:]",
    "h[h.shape[0] // 2 - 2]",
    "h[3 - h.shape[0]]",
    "h.narrow(0, h.shape[0] // 3, h.shape[0] // 2 + 1)",
    "torch.cat([h[h.shape[0] // 2:], h[:h.shape[0] // 2]])",
    "h.split([h.shape[0] - 1, 1])[0]",
    "h = h * 1; h[2 - h.shape[0]:] = 0.5",
    "h = h * 1; h[h.shape[0] - 3:].mul_(0.5)",
    "h = h * 1; h[h.shape[0] - 2] = h[0]",
    "torch.slice_scatter(h, h[:1] * 2, 0, h.shape[0] - 2, h.shape[0] - 1)",
    "h * (h.shape[0] - 3) / max(h.shape[0] - 2, 1)",
    "h.flatten(1).mT.triu(h.shape[0] - 4)",
    "h.roll(h.shape[0] - 2, 0)",
)
"""Signs of such expressions differ from batch to batch with `dynamic=True`."""

SELECTIONS = (
    "k = a0.flatten(1).sum(1) > 0; h = h.index_put((k,), h[k].tanh())",
    "k = a0.flatten(1).sum(1) > 0; h = h + h[k].sum(0)",
    "k = a0.flatten(1).sum(1) > 0; h = h - h[k].softmax(0).square().sum() + h[~k].mean()",
    "k = a0.flatten(1)[:, 0] > -0.5; h = h * h[k, ..., 0].std()",
    "k = a0.flatten(1)[:, 0] > -0.5; h = h.masked_scatter(h > 9, h[k]) * h[k].amax()",
    "k = (a0.flatten(1).sum(1) > 0).nonzero()[:, 0]; h = h.index_add(0, k, h[k] * 2)",
    "k, n = (a0.flatten(1)[:, 0] > 0).long().unique(return_counts=True); h = h * (h[k] * n.view([-1] + [1] * (h.dim() - 1))).mean()",
    "k = (a0.flatten(1)[:, 0] > 0).long() + 1; h = h + h.repeat_interleave(k, 0).mean(0)",
    "h = h + h.masked_select(a0.flatten(1).sum(1).view([-1] + [1] * (h.dim() - 1)) > 0).mean()",
)
"""What the values of the model's argument select."""
