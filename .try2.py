import torch, torch.distributed as dist, sys, tempfile
import torch.nn as nn, torch.nn.functional as F
from pathlib import Path
import daceml_train as dt
from tests.driver.ranks import Ranks


def f(rank, shard):
    torch.manual_seed(0)
    m = nn.Sequential(*[l for _ in range(4) for l in (nn.Linear(64, 64), nn.ReLU())], nn.Linear(64, 10))
    o = torch.optim.AdamW(m.parameters(), lr=1e-2)
    s = dt.training_step(m, F.cross_entropy, o, mesh=dist.group.WORLD, bucket=20000, shard=shard, clip_norm=1.0)
    g = torch.Generator().manual_seed(1)
    for i in range(3):
        x = torch.randn(16, 64, generator=g)
        y = x[:, :10].argmax(1)
        l = s(x[rank::2], y[rank::2])
    p = s.records[-1].executable.program
    return (
        float(l),
        s.breaks,
        s.network,
        [x.target for x in p.launches if hasattr(x, "target") and isinstance(x.target, str)],
        [float(q.sum()) for q in m.parameters()][:4],
    )


if __name__ == "__main__":
    r = Ranks(Path(tempfile.mkdtemp()), 2)
    for shard in (None, "optimizer"):
        for a in r(f, shard):
            print(a)
    torch.manual_seed(0)
    m = nn.Sequential(*[l for _ in range(4) for l in (nn.Linear(64, 64), nn.ReLU())], nn.Linear(64, 10))
    o = torch.optim.AdamW(m.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(1)
    for i in range(3):
        x = torch.randn(16, 64, generator=g)
        y = x[:, :10].argmax(1)
        o.zero_grad()
        l = F.cross_entropy(m(x), y)
        l.backward()
        nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        o.step()
    print(float(l), [float(q.sum()) for q in m.parameters()][:4])
    r.close()
