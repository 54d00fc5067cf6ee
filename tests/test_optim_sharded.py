"""The optimizer over two processes (gloo, FSDP2) against one process that has everything."""

import datetime
import math
from dataclasses import dataclass

import pytest
import torch
from torch import distributed as dist

import multigate as mg
from multigate.optim import Muon, OptimConfig, build_optimizer, not_finite

pytestmark = pytest.mark.slow

RANKS, STEPS, VOCAB = 2, 5, 63
CONFIG = OptimConfig(warmup=1, clip=0.5)
SHAPES = [(7, 3), (3, 7), (1, 4), (7, 3), (8, 8)]
"""Rows that two ranks cannot share evenly, one that leaves a rank with nothing."""


@dataclass
class Run:
    losses: list
    norms: list
    tensors: dict
    """Parameters and optimizer state, whole."""


def small(residual, dtype):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "blocks": 2, "width": 32, "heads": 2, "context": 8}
    return mg.GPT(mg.preset("tiny", residual=residual, **sizes)).to(dtype)


def shard(model):
    """The matrices of each sublayer, and the rest: the residual calls the sublayers' norms itself.

    fully_shard takes no scalars: they stay whole on every rank, and the last norm with them.
    """
    from torch.distributed.fsdp import fully_shard

    kept = [p for n, p in model.named_parameters() if p.ndim == 0 or n.startswith("stack.out_norm")]
    for sublayer in model.stack.sublayers:
        fully_shard([m for m in sublayer.children() if isinstance(m, torch.nn.Linear)])
    fully_shard(model, ignored_params=set(kept))
    return kept


def whole(tensors):
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()
        for name, t in tensors.items()
    }


def mean(x):
    x = x.detach().clone()
    dist.all_reduce(x)
    return x / RANKS


def everything(model, optimizer):
    return whole({**dict(model.named_parameters()), **optimizer.state()})


def learn(model, optimizer, steps, rank=None, kept=()):
    """Train on four windows a step, of which a rank sees its half; `rank` None sees all."""
    losses, norms = [], []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCAB, (2 * RANKS, 9), generator=generator)
        tokens = tokens if rank is None else tokens[2 * rank : 2 * rank + 2]
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        for p in kept:
            p.grad = mean(p.grad)
        optimizer.set_step(step)
        norm = optimizer.clip()
        optimizer.step(not_finite(norm))
        losses.append((loss if rank is None else mean(loss)).item())
        norms.append(norm.item())
    return Run(losses, norms, everything(model, optimizer))


def gpt_runs(rank, residual, dtype):
    alone, model = small(residual, dtype), small(residual, dtype)
    first = learn(alone, build_optimizer(alone, CONFIG, STEPS), range(STEPS))
    kept = shard(model)
    optimizer = build_optimizer(model, CONFIG, STEPS)
    return first, learn(model, optimizer, range(STEPS), rank, kept)


def matrix_runs(rank):
    """Muon alone on awkward shapes, in float64, every rank with the same gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (RANKS,))
    generator = torch.Generator().manual_seed(0)

    def draw():
        return [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]

    values, gradients = draw(), [draw() for _ in range(3)]
    runs = []
    for dim in (None, 0, 1):

        def lay(x, dim=dim):
            return x.clone() if dim is None else distribute_tensor(x, mesh, [Shard(dim)])

        params = [torch.nn.Parameter(lay(x)) for x in values]
        muon = Muon(params, lr=0.1)
        for gs in gradients:
            for p, g in zip(params, gs, strict=True):
                p.grad = lay(g)
            muon.step()
        tensors = {f"p{k}": p for k, p in enumerate(params)}
        tensors |= {f"m{k}": muon.state[p]["momentum"] for k, p in enumerate(params)}
        runs.append(whole(tensors))
    return runs


def skipped_runs(rank):
    """One NaN on the last rank only: no rank may step."""
    model = small("mgr-competitive", torch.float64)
    kept = shard(model)
    optimizer = build_optimizer(model, CONFIG, STEPS)
    before = learn(model, optimizer, range(2), rank, kept).tensors
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    if rank == RANKS - 1:
        model.stack.sublayers[2].q.weight.grad.to_local()[0, 0] = math.nan
    norm = optimizer.clip()
    optimizer.step(not_finite(norm))
    return norm.item(), before, everything(model, optimizer)


def state_runs(rank):
    """A run of one process continued by two, and one of two continued by one."""
    single, pair = (small("mgr-competitive", torch.float64) for _ in range(2))
    kept = shard(pair)
    optimizers = [build_optimizer(m, CONFIG, STEPS) for m in (single, pair)]
    first = learn(single, optimizers[0], range(2)).tensors
    half = learn(pair, optimizers[1], range(2), rank, kept).tensors

    fresh = [small("mgr-competitive", torch.float64) for _ in range(2)]
    names = [n for n, _ in single.named_parameters()]
    fresh[0].load_state_dict({n: half[n] for n in names})
    fresh[1].load_state_dict({n: first[n] for n in names})
    kept = shard(fresh[1])
    resumed = [build_optimizer(m, CONFIG, STEPS) for m in fresh]
    layouts = [getattr(t, "placements", None) for t in resumed[1].state().values()]
    resumed[0].load_state(optimizers[1].state())
    resumed[1].load_state(optimizers[0].state())
    same = layouts == [getattr(t, "placements", None) for t in resumed[1].state().values()]
    rest = range(2, STEPS)
    continued = learn(fresh[0], resumed[0], rest), learn(fresh[1], resumed[1], rest, rank, kept)
    return same, *continued


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=60),
    )
    results = {
        "float32": gpt_runs(rank, "mgr-competitive", torch.float32),
        "float64": gpt_runs(rank, "mgr-competitive", torch.float64),
        "hc": gpt_runs(rank, "hc", torch.float64),
        "matrices": matrix_runs(rank),
        "skipped": skipped_runs(rank),
        "state": state_runs(rank),
    }
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of two processes saw."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs torch with gloo")
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def assert_close(a, b, atol):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=atol, msg=name)


def test_losses_are_those_of_one_process(results):
    for result in results:
        alone, sharded = result["float32"]
        assert sharded.losses == pytest.approx(alone.losses, abs=1e-5)
        assert sharded.norms == pytest.approx(alone.norms, rel=1e-4)
        assert alone.losses[-1] < alone.losses[0]


@pytest.mark.parametrize("case", ["float64", "hc"])
def test_parameters_and_state_are_those_of_one_process(results, case):
    """In float64, where AdamW does not blow rounding up; hc has scalars, which are not sharded."""
    for result in results:
        alone, sharded = result[case]
        assert sharded.losses == pytest.approx(alone.losses, abs=1e-12)
        assert sharded.norms == pytest.approx(alone.norms, rel=1e-12)
        assert min(alone.norms) > CONFIG.clip
        assert_close(sharded.tensors, alone.tensors, 1e-11)


def test_rows_that_do_not_divide(results):
    for result in results:
        alone, by_rows, by_columns = result["matrices"]
        assert_close(by_rows, alone, 1e-13)
        assert_close(by_columns, alone, 1e-13)


def test_a_nan_on_one_rank_stops_all(results):
    for result in results:
        norm, before, after = result["skipped"]
        assert math.isnan(norm)
        assert_close(after, before, 0)


def test_state_moves_between_one_process_and_two(results):
    for result in results:
        uninterrupted, _ = result["float64"]
        same_layout, single, pair = result["state"]
        assert same_layout
        for run in (single, pair):
            assert run.losses == pytest.approx(uninterrupted.losses[2:], abs=1e-12)
            assert_close(run.tensors, uninterrupted.tensors, 1e-11)
