"""What the processes of a `pool.Pool` compute. A function takes the number of ranks, then its arguments."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist

import flashgen
from flashgen.distributed import attention, decode, local_lengths, positions, shard, unshard
from flashgen.distributed.layouts import LAYOUTS
from flashgen.errors import FlashgenError

groups = {}
meshes = {}


def start(rank):
    """Groups of the first 2 ranks and of all; every process makes all groups."""
    from torch.distributed.device_mesh import init_device_mesh

    groups[1] = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    groups[2] = dist.new_group([0, 1])
    groups[4] = dist.group.WORLD
    meshes["flat"] = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    meshes["square"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "inside"))


def place(world, mesh):
    return {"mesh": meshes[mesh]} if mesh else {"group": groups[world]}


def tensors(case):
    """q, k, v, dout, and dlse of the whole call, from the case's seed."""
    g = torch.Generator().manual_seed(case.get("seed", 0))
    heads, kv_heads = case["heads"]
    dims = case.get("dims", (16, 16))
    packed = case.get("cu_seqlens") is not None
    n = case["cu_seqlens"][-1] if packed else case["seqlen"]
    lead = () if packed else (case.get("batch", 1),)
    dtype = getattr(torch, case.get("dtype", "float32"))
    shapes = (heads, dims[0]), (kv_heads, dims[0]), (kv_heads, dims[1]), (heads, dims[1])
    arrays = [torch.randn(*lead, n, *shape, generator=g).to(dtype) for shape in shapes]
    dlse = torch.randn(*lead, heads, n, generator=g)
    extra = {}
    if case.get("sinks"):
        extra["sinks"] = torch.randn(heads, generator=g).requires_grad_()
    if case.get("alibi"):
        extra["alibi_slopes"] = torch.rand(heads, generator=g)
    return arrays, dlse, extra


def options_of(case):
    names = ("causal", "window_size", "softcap", "softmax_scale", "dropout_p")
    options = {name: case[name] for name in names if name in case}
    return options | ({"dropout_seed": (5, 7)} if "dropout_p" in case else {})


def mask_of(case):
    """The mask of a case, ``(line, sizes)``; an array of integers or bools for each name of sizes."""
    if "mask" not in case:
        return None
    line, sizes = case["mask"]
    g = torch.Generator().manual_seed(9)
    params = {}
    for name, size in sizes.items():
        if isinstance(size, int):
            params[name] = size
        elif name == "keep":
            params[name] = torch.rand(size, generator=g) < 0.7
        elif name == "doc":
            params[name] = torch.randint(0, 5, size, generator=g, dtype=torch.int32).sort(-1).values
        else:
            params[name] = torch.randint(0, 90, size, generator=g, dtype=torch.int32)
    return flashgen.Mask(line, **params)


def on_one(case):
    """Results and gradients of the whole call in one process."""
    (q, k, v, dout), dlse, extra = tensors(case)
    for x in (q, k, v):
        x.requires_grad_()
    lengths = {}
    if case.get("cu_seqlens") is not None:
        cu = torch.tensor(case["cu_seqlens"], dtype=torch.int32)
        longest = int((cu[1:] - cu[:-1]).max())
        lengths = {
            "cu_seqlens_q": cu,
            "cu_seqlens_kv": cu.clone(),
            "max_seqlen_q": longest,
            "max_seqlen_kv": longest,
        }
    out, lse = flashgen.attention(
        q, k, v, mask=mask_of(case), **options_of(case), **lengths, **extra, return_lse=True
    )
    torch.autograd.backward((out, lse), (dout, dlse))
    sinks = extra.get("sinks")
    return out.detach(), lse.detach(), q.grad, k.grad, v.grad, None if sinks is None else sinks.grad


def on_ranks(case, world):
    """The same of this rank's shards."""
    (q, k, v, dout), dlse, extra = tensors(case)
    where = place(world, case.get("mesh"))
    layout, cu = case.get("layout", "zigzag"), case.get("cu_seqlens")
    dim = 0 if cu is not None else 1

    def cut(x, dim):
        return shard(x, dim, layout=layout, cu_seqlens=cu, **where).contiguous()

    q, k, v = (cut(x, dim).requires_grad_() for x in (q, k, v))
    names = ("method", "deterministic", "kv_heads_per_step", "sm_margin")
    more = {name: case[name] for name in names if name in case}
    if cu is not None:
        more["cu_seqlens"] = cu
    else:
        more["seqlen"] = case["seqlen"]
    more["mask"] = mask_of(case)
    out, lse = attention(
        q, k, v, layout=layout, **options_of(case), **more, **extra, **where, return_lse=True
    )
    torch.autograd.backward((out, lse), (cut(dout, dim), cut(dlse, dlse.ndim - 1)))
    sinks = extra.get("sinks")
    if sinks is not None:
        dist.all_reduce(sinks.grad, group=groups[world])
    whole = [
        unshard(
            x.detach(),
            d,
            layout=layout,
            cu_seqlens=cu,
            seqlen=None if cu is not None else case["seqlen"],
            **where,
        )
        for x, d in ((out, dim), (lse, lse.ndim - 1), (q.grad, dim), (k.grad, dim), (v.grad, dim))
    ]
    return (*whole, None if sinks is None else sinks.grad)


def compare(world, case):
    """The largest differences of results and gradients from one process, relative to the largest element, and
    whether out and lse have equal bits.
    """
    ours, right = on_ranks(case, world), on_one(case)
    differences = []
    for x, y in zip(ours, right, strict=True):
        if y is None:
            continue
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        finite = y.isfinite()
        assert bool((x[~finite] == y[~finite]).all())
        if y.numel():
            scale = max(1e-6, float(y[finite].abs().max()))
            differences.append(float((x[finite].double() - y[finite].double()).abs().max()) / scale)
    return differences, [torch.equal(x, y) for x, y in zip(ours[:2], right[:2], strict=True)]


def compare_forward(world, case):
    """Whether out and lse of this rank have the bits of one process, without gradients."""
    (q, k, v, _), _, _ = tensors(case)
    where, layout, cu = place(world, case.get("mesh")), case.get("layout", "zigzag"), case.get("cu_seqlens")
    dim, lengths, more = 1, {}, {"seqlen": case["seqlen"]}
    if cu is not None:
        bounds = torch.tensor(cu, dtype=torch.int32)
        longest = max(y - x for x, y in pairwise(cu))
        lengths = {"cu_seqlens_q": bounds, "cu_seqlens_kv": bounds.clone()}
        lengths |= {"max_seqlen_q": longest, "max_seqlen_kv": longest}
        dim, more = 0, {"cu_seqlens": cu}
    mask = mask_of(case)
    right = flashgen.attention(q, k, v, mask=mask, **options_of(case), **lengths, return_lse=True)
    shards = (shard(x, dim, layout=layout, cu_seqlens=cu, **where) for x in (q, k, v))
    more |= {"mask": mask, "return_lse": True}
    ours = attention(*shards, method="gather", layout=layout, **options_of(case), **more, **where)
    dims = dim, ours[1].ndim - 1
    right = (shard(x, d, layout=layout, cu_seqlens=cu, **where) for x, d in zip(right, dims, strict=True))
    return [bool(torch.equal(x, y)) for x, y in zip(ours, right, strict=True)]


def call(world, case, changes=None):
    """What a call with other arguments on this rank raises: its class and its text; None if nothing."""
    changes = changes or {}
    (q, k, v, _), _, extra = tensors(case)
    where = place(world, case.get("mesh"))
    layout, cu = case.get("layout", "zigzag"), case.get("cu_seqlens")
    q, k, v = (shard(x, 0 if cu else 1, layout=layout, cu_seqlens=cu, **where) for x in (q, k, v))
    if "tokens" in changes:
        q, k, v = (x[:, : changes["tokens"]] for x in (q, k, v))
    arguments = {"layout": layout, **options_of(case), **extra, **where}
    arguments |= {
        name: case[name] for name in ("method", "seqlen") if name in case and not (name == "seqlen" and cu)
    }
    if cu:
        arguments["cu_seqlens"] = cu
    arguments["mask"] = mask_of(case)
    arguments |= {name: x for name, x in changes.items() if name != "tokens"}
    if "seqlen" in arguments and arguments["seqlen"] == "unknown":
        del arguments["seqlen"]
    try:
        attention(q, k, v, **arguments)
    except (FlashgenError, TypeError) as error:
        return type(error).__name__, str(error)
    return None


def deterministic(world, case):
    """Whether two passes have the same bits."""
    first, second = on_ranks(case, world), on_ranks(case, world)
    return all(torch.equal(x, y) for x, y in zip(first[:5], second[:5], strict=True))


def documents_apart(world, case):
    """Whether the results of other documents keep their bits when the first one changes."""
    (q, k, v, _), _, _ = tensors(case)
    cu, where, layout = case["cu_seqlens"], place(world, None), case["layout"]
    results = []
    for factor in (1.0, 100.0):
        k = k.clone()
        k[: cu[1]] *= factor
        parts = (shard(x, 0, layout=layout, cu_seqlens=cu, **where) for x in (q, k, v))
        out = attention(*parts, layout=layout, cu_seqlens=cu, causal=True, method=case["method"], **where)
        results.append(unshard(out, 0, layout=layout, cu_seqlens=cu, **where))
    first, second = results
    changed = (first != second).flatten(1).any(1)
    return bool(changed[: cu[1]].any()), bool(changed[cu[1] :].any())


def weight_gradients(world, method):
    """The gradient of a weight, summed over ranks, and of one process, of the mean loss over all tokens."""
    g = torch.Generator().manual_seed(3)
    x, weight = torch.randn(1, 64, 32, generator=g), torch.randn(32, 3 * 32, generator=g) / 6
    target = torch.randn(1, 64, 32, generator=g)
    where = place(world, None)

    def loss(x, target, attend):
        q, k, v = (x @ weight).view(1, -1, 3, 4, 8).unbind(2)
        return ((attend(q, k, v).flatten(2) - target) ** 2).sum() / 64

    weight.requires_grad_()
    loss(x, target, lambda *a: flashgen.attention(*a, causal=True)).backward()
    right, weight.grad = weight.grad, None
    x, target = (shard(y, 1, **where) for y in (x, target))
    loss(x, target, lambda *a: attention(*a, causal=True, method=method, **where)).backward()
    dist.all_reduce(weight.grad, group=groups[world])
    return float((weight.grad - right).abs().max() / right.abs().max())


def many_calls(world, count):
    """Calls one after another, of other heads, methods and layouts, that nobody waits between."""
    worst = 0.0
    for number in range(count):
        case = {"heads": ((8, 4), (4, 4), (8, 2))[number % 3], "seqlen": 40 + number, "seed": number}
        case |= {"causal": number % 2 == 0, "method": ("gather", "ulysses")[number % 2]}
        case["layout"] = LAYOUTS[number % len(LAYOUTS)]
        worst = max(worst, *compare(world, case)[0])
    return worst


def compiled(world, case):
    """Differences of a compiled call and its gradients from the eager call, and how many graphs there are."""
    from torch._dynamo.testing import CompileCounterWithBackend

    (q, k, v, dout), _, _ = tensors(case)
    where = place(world, case.get("mesh"))
    q, k, v, dout = (shard(x, 1, **where).contiguous() for x in (q, k, v, dout))

    options = {"mask": mask_of(case), "method": case["method"], "causal": True}
    if "dropout_p" in case:
        options |= {"dropout_p": case["dropout_p"], "dropout_seed": torch.tensor([5, 7])}

    def attend(q, k, v):
        return attention(q * 2, k, v, **options, **where).sin()

    counter = CompileCounterWithBackend("aot_eager")
    results = []
    for function in (attend, torch.compile(attend, backend=counter, fullgraph=True)):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = function(*inputs)
        out.backward(dout)
        results.append((out.detach(), *(x.grad for x in inputs)))
    return max(float((x - y).abs().max()) for x, y in zip(*results, strict=True)), counter.frame_count


def fully_sharded(world, case):
    """Differences of the gradients of weights that FSDP shards over the ranks among which a sequence is cut,
    from those of one process.
    """
    from torch.distributed.fsdp import fully_shard

    heads, kv_heads = case["heads"]
    torch.manual_seed(3)
    x, dout = torch.randn(2, 1, case["seqlen"], 32)
    model = torch.nn.ModuleList(
        [torch.nn.Linear(32, 16 * (heads + 2 * kv_heads)), torch.nn.Linear(16 * heads, 32)]
    )
    alone = torch.nn.ModuleList([torch.nn.Linear(y.in_features, y.out_features) for y in model])
    alone.load_state_dict(model.state_dict())

    def out_of(layers, x, attend):
        qkv = layers[0](x).unflatten(-1, (-1, 16))
        q, k, v = (y.contiguous() for y in qkv.split((heads, kv_heads, kv_heads), 2))
        return layers[1](attend(q, k, v, causal=True).flatten(2))

    out_of(alone, x, flashgen.attention).backward(dout)
    mesh = meshes["flat"]
    for layer in model:
        fully_shard(layer, mesh=mesh)
    here = {"mesh": mesh}
    attend = partial(attention, method=case["method"], seqlen=case["seqlen"], **here)
    out_of(model, shard(x, 1, **here), attend).backward(shard(dout, 1, **here))
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    # FSDP takes the mean over ranks.
    return max(float((world * p.grad.full_tensor() - right.grad).abs().max()) for p, right in pairs)


def cut_and_join(world, mesh):
    """Whether shards come together again, and positions are those of the tokens."""
    where, right = place(world, mesh), True
    for n in (0, 1, 7, 64, 203):
        for layout in LAYOUTS:
            cu = [0, n // 3, n // 3, n]
            x = torch.arange(2 * n).view(2, n)
            part = shard(x, 1, layout=layout, cu_seqlens=cu, **where)
            right &= torch.equal(unshard(part, 1, layout=layout, cu_seqlens=cu, **where), x)
            spots = positions(layout=layout, cu_seqlens=cu, **where)
            begins = torch.where(part[0] < cu[1], 0, cu[1])
            right &= torch.equal(spots, part[0] - begins)
            ascends = bool((part[0][1:] > part[0][:-1]).all())
            right &= ascends or layout == "whole_documents"
    return right


def decoded(world, case):
    """The largest difference of decode() from attention over the whole cache, whether LSEs are close, and
    whether all ranks have the same bits.
    """
    g = torch.Generator().manual_seed(case.get("seed", 0))
    lengths = torch.tensor(case["lengths"], dtype=torch.int32)
    batch, most = len(lengths), max(case["lengths"])
    heads, kv_heads = case.get("heads", (4, 2))
    q = torch.randn(batch, 1, heads, 16, generator=g) * case.get("size", 1.0)
    k, v = (torch.randn(batch, most, kv_heads, 16, generator=g) for _ in "kv")
    sinks = torch.randn(heads, generator=g) if case.get("sinks") else None
    right = flashgen.attention(q, k, v, kv_lengths=lengths, sinks=sinks, return_lse=True)
    where, interleave = place(world, case.get("mesh")), case.get("interleave", 1)
    here = local_lengths(lengths, interleave=interleave, **where)
    rank = dist.get_rank()
    chosen = [i for i in range(most) if i // interleave % world == rank]
    size = max(1, len(chosen))
    if "page" in case:
        page = case["page"]
        count = -(-size // page)
        caches = [torch.full((batch * count, page, kv_heads, 16), float("nan")) for _ in "kv"]
        pages = torch.randperm(batch * count, generator=g).view(batch, count).to(torch.int32)
        for cache, x in zip(caches, (k, v), strict=True):
            for sequence in range(batch):
                for place_here, token in enumerate(chosen):
                    cache[pages[sequence, place_here // page], place_here % page] = x[sequence, token]
        cache = flashgen.KVCache(*caches, here, pages=pages)
    else:
        caches = [torch.zeros(batch, size, kv_heads, 16) for _ in "kv"]
        for cache, x in zip(caches, (k, v), strict=True):
            cache[:, : len(chosen)] = x[:, chosen]
        cache = flashgen.KVCache(*caches, here)
    out, lse = decode(q, cache, sinks=sinks, return_lse=True, **where)
    everyone = [torch.empty_like(out) for _ in range(world)]
    dist.all_gather(everyone, out, group=groups[world])
    finite = right[1].isfinite()
    return (
        float((out - right[0]).abs().max()),
        bool((lse[~finite] == right[1][~finite]).all())
        and torch.allclose(lse[finite], right[1][finite], atol=1e-5),
        all(torch.equal(x, out) for x in everyone),
        int(here.sum()),
    )


def refused_decode(world, changes):
    q = torch.randn(1, changes.get("queries", 1), 4, 16)
    cache = flashgen.KVCache(*(torch.randn(1, 3, 2, 16) for _ in "kv"), torch.tensor([3], dtype=torch.int32))
    try:
        decode(
            q, cache, **place(world, None), **{name: x for name, x in changes.items() if name != "queries"}
        )
    except (FlashgenError, TypeError) as error:
        return type(error).__name__, str(error)
    return None


def example(world, method):
    """The losses of the example over ranks, and alone."""
    import sys
    from pathlib import Path

    folder = str(Path(__file__).parents[2] / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import train_long

    size = train_long.Size(1, 32, 4, 2, 200, 1)
    return [train_long.train(size, 8, over_ranks=over, method=method) for over in (True, False)]


def on_dtensors(world, case, placements):
    """The largest differences of results and gradients of DTensors with these placements from one process;
    and the placements of out, so that a call that gathers is found.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from flashgen.distributed.dtensor import register

    register()
    (q, k, v, dout), dlse, extra = tensors(case)
    mesh = meshes["square" if len(placements) == 2 else "flat"]
    of_tokens = [Replicate() if dim is None else Shard(dim) for dim in placements]
    of_heads = [Shard(0) if dim == dout.ndim - 2 else Replicate() for dim in placements]
    of_rows = [x if x == Replicate() or x.dim == 0 else Shard(x.dim - 1) for x in of_tokens]
    if dout.ndim == 3:
        of_rows = of_heads
    shards = [distribute_tensor(x, mesh, of_tokens).requires_grad_() for x in (q, k, v)]
    more, others = {}, []
    if "sinks" in extra:
        more["sinks"] = distribute_tensor(extra["sinks"].detach(), mesh, of_heads).requires_grad_()
        others.append(more["sinks"])
    if case.get("cu_seqlens") is not None:
        cu = distribute_tensor(torch.tensor(case["cu_seqlens"], dtype=torch.int32), mesh)
        more |= {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 90, "max_seqlen_kv": 90}
    out, lse = flashgen.attention(*shards, **options_of(case), **more, return_lse=True)
    cotangents = distribute_tensor(dout, mesh, of_tokens), distribute_tensor(dlse, mesh, of_rows)
    torch.autograd.backward((out, lse), cotangents)
    ours = (out, lse, *(x.grad for x in (*shards, *others)))
    right = [x for x in on_one(case) if x is not None]
    whole = [x.detach().full_tensor() for x in ours]
    differences = [float((x - y).abs().max()) for x, y in zip(whole, right, strict=True)]
    return max(differences), str(out.placements) == str(tuple(of_tokens))


def drawn_dropout(world):
    """The results of two calls with dropout, on generators that differ between ranks."""
    torch.manual_seed(dist.get_rank())
    (q, k, v, _), *_ = tensors({"heads": (4, 4), "seqlen": 16, "batch": 2})
    shards = [shard(x, 1).contiguous() for x in (q, k, v)]
    return [unshard(attention(*shards, dropout_p=0.5), 1).tolist() for _ in range(2)]


def dropout_of_dtensors(world, placements):
    """Whether a call with dropout is computed whole, with the bits of one process."""
    from torch.distributed.tensor import Shard, distribute_tensor

    from flashgen.distributed.dtensor import register

    register()
    (q, k, v, _), *_ = tensors({"heads": (8, 4), "seqlen": 40, "batch": 4})
    shards = [distribute_tensor(x, meshes["flat"], [Shard(placements)]) for x in (q, k, v)]
    seed = torch.tensor([5, 7])
    out = flashgen.attention(*shards, dropout_p=0.25, dropout_seed=distribute_tensor(seed, meshes["flat"]))
    return torch.equal(out.full_tensor(), flashgen.attention(q, k, v, dropout_p=0.25, dropout_seed=seed))


def error_of_dv(world, case):
    """The largest error of dv from float64, in units of half a step of its dtype: 1 where no more than the
    result is rounded.
    """
    dv = on_ranks(case, world)[4].double()
    (q, k, v, dout), dlse, extra = tensors(case)
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    out, lse = flashgen.attention(q, k, v, **options_of(case), **extra, return_lse=True)
    torch.autograd.backward((out, lse), (dout.double(), dlse.double()))
    step = torch.finfo(getattr(torch, case["dtype"])).eps * torch.exp2(v.grad.abs().log2().floor())
    noise = 1e-5 * v.grad.abs().mean()  # of fp32, where terms cancel
    return float((2 * ((dv - v.grad).abs() - noise) / step).max())
