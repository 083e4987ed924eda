"""A probe's attention on a GPU is that of a CPU; where there is one."""

from __future__ import annotations

import pytest
import torch

from dropkv.kernels.probe import probe_attention
from dropkv.methods import get


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["dropkv", "snapkv", "laprox"])
def test_attention_and_scores_on_a_gpu(method: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(heads, n, 64, generator=generator).to(dtype) for heads, n in ((6, 70), (2, 200), (2, 200)))
    k[:, 9] *= 6  # some weights near 1
    chosen = get(method).under_replay(4)
    found = []
    for device in ("cpu", "cuda"):
        given = [x.to(device) for x in (q, k, v)]
        out, scores = probe_attention(*given, scale=0.125, columns=130, score=chosen.scores)
        assert scores is not None
        found.append((out.double().cpu(), scores.double().cpu()))
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    for one, other in zip(*found, strict=True):
        assert float((one - other).norm() / one.norm()) < tolerance
