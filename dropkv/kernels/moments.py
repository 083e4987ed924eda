"""Mean and covariance of a stream of queries, for scores that expect what future queries will look like."""

from __future__ import annotations

import torch
from torch import Tensor


class Moments:
    """Count, mean [heads, d] and covariance [heads, d, d] (divided by the count) of the queries added so far, without keeping them."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(0)
        self.scatter = torch.zeros(0)

    def add(self, q: Tensor) -> None:
        """Take in queries [heads, tokens, d]."""
        count = q.shape[1]
        if count == 0:
            return
        q = q.to(torch.promote_types(q.dtype, torch.float32))
        mean = q.mean(1)
        spread = q - mean.unsqueeze(1)
        scatter = spread.transpose(1, 2) @ spread
        if self.count == 0:
            self.count, self.mean, self.scatter = count, mean, scatter
            return
        both = self.count + count
        step = mean - self.mean
        outer = step.unsqueeze(2) * step.unsqueeze(1)
        self.scatter = self.scatter + scatter + outer * (self.count * count / both)
        self.mean = self.mean + step * (count / both)
        self.count = both

    @property
    def covariance(self) -> Tensor:
        """[heads, d, d]."""
        return self.scatter / max(1, self.count)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [..., d] by cos and sin [..., r <= d], in the layout that they have themselves.

    Most families pair dimension i with i + r/2 and repeat the angles as a whole, some pair neighbours and repeat each angle.
    """
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    half = width // 2
    if torch.equal(cos[..., :half], cos[..., half:]) and torch.equal(sin[..., :half], sin[..., half:]):
        across = torch.cat([-turned[..., half:], turned[..., :half]], -1)
    else:
        across = torch.stack([-turned[..., 1::2], turned[..., 0::2]], -1).flatten(-2)
    turned = turned * cos + across * sin
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What `rotate` made x [..., d] of; cos and sin may carry a common factor."""
    width = cos.shape[-1]
    back = rotate(x, cos, -sin)
    turned = back[..., :width] / (cos.square() + sin.square())
    return torch.cat([turned, back[..., width:]], -1) if width < x.shape[-1] else turned
