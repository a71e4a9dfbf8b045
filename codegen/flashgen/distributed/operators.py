"""Attention over ranks as operators of PyTorch, which autograd and torch.compile see: groups are names, and
documents are a tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashgen.call.tensors import with_rows
from flashgen.distributed import passes, ulysses
from flashgen.distributed.groups import ranks_of
from flashgen.distributed.heads import head_shares
from flashgen.distributed.layouts import LAYOUTS_OF_DOCUMENTS, runs_of, tokens_of
from flashgen.distributed.passes import Inputs
from flashgen.distributed.setting import Options, setting_of
from flashgen.errors import BadParam
from flashgen.host.torchimport import is_file_of

if TYPE_CHECKING:
    from flashgen.distributed.setting import Setting

is_file_of(__file__, __name__)

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? alibi_slopes, Tensor? cu_seqlens, "
    "Tensor? dropout_seed, Tensor[] mask_arrays"
)
_OPTIONS = (
    "str outer, str inner, str layout, bool causal, SymInt window_left, SymInt window_right, "
    "float? softmax_scale, float? softcap, SymInt? seqlen, bool deterministic, SymInt? kv_heads_per_step, "
    "float dropout_p, int sm_margin, str mask_line, SymInt[] mask_numbers"
)
_TENSORS = 7
_COUNT = _TENSORS + 1  # with the arrays of the mask


_PLAIN = (Tensor, torch.nn.Parameter)


def is_plain(*inputs: Tensor | None) -> bool:
    """Whether the function may be called instead of its operator: nothing records gradients or traces a
    graph. An operator takes the host some 50 microseconds more, in which the GPU may be idle.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if any(x is not None and type(x) not in _PLAIN for x in inputs):
        return False
    return not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in inputs)


def _of_unit(
    setting: Setting, arrays: tuple[Tensor, ...], sinks: Any, slopes: Any, dropout_seed: Any, mask: Any
) -> Inputs:
    """The inputs of a unit. q, k and v in ``arrays`` are (rows, batch, heads, head_dim), or without an inner
    dimension (batch, rows, heads, head_dim).
    """
    inner = setting.ranks.inner is not None
    q, k, v = (x.transpose(0, 1) for x in arrays) if inner else arrays
    heads = setting.q_heads
    return Inputs(
        q,
        k,
        v,
        None if sinks is None else sinks[heads],
        None if slopes is None else slopes[..., heads],
        dropout_seed,
        mask,
    )


def _batched(x: Tensor, packed: bool) -> Tensor:
    x = with_rows(x)
    return x[None] if packed else x


@torch.no_grad()
def run(*args: Any) -> tuple[Tensor, ...]:
    """out and lse of a shard; then q, k, v, out and lse of the unit, empty without an inner dimension."""
    q, k, v, sinks, slopes, _, dropout_seed, mask_arrays = args[:_COUNT]
    options = Options(*args[_COUNT:])
    mask = options.mask(mask_arrays)
    setting = setting_of(*args[:_TENSORS], mask, options)
    packed = setting.packed
    arrays = tuple(_batched(x, packed) for x in (q, k, v))
    group, members = setting.ranks.inner, setting.members
    if group is not None:
        q4, k4, v4 = arrays
        k4, v4 = (ulysses.for_ranks(x, setting.split) for x in (k4, v4))
        arrays = tuple(ulysses.to_heads(x, members, group) for x in (q4, k4, v4))
    inputs = _of_unit(setting, arrays, sinks, slopes, dropout_seed, mask)
    batch, rows, heads, _ = inputs.q.shape
    lse = q.new_empty((batch, heads, rows), dtype=torch.float32)
    if group is None:
        out = q.new_empty((batch, rows, heads, v.shape[-1]))
        passes.forward(setting, options, inputs, out, lse)
        kept = tuple(q.new_empty(0) for _ in range(5))
    else:
        of_unit = q.new_empty((rows, batch, heads, v.shape[-1]))
        passes.forward(setting, options, inputs, of_unit.transpose(0, 1), lse)
        kept = (*arrays, of_unit, lse)
        out = ulysses.to_tokens(of_unit, members, group)
        lse = ulysses.to_tokens(lse.permute(2, 0, 1)[..., None], members, group)[..., 0].transpose(1, 2)
    if packed:
        out, lse = out[0], lse[0]
    return out, lse.contiguous(), *kept


forward = torch.library.custom_op(
    "flashgen::distributed_attention",
    mutates_args=(),
    schema=f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)(run)


@forward.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    q, k, v, _, _, cu_seqlens, *_ = args[:_COUNT]
    options = Options(*args[_COUNT:])
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
    ranks = ranks_of(options.outer, options.inner)
    if ranks.inner is None:
        return out, lse, *(q.new_empty(0) for _ in range(5))
    split = head_shares(q.shape[-2], k.shape[-2], ranks.inner_size)
    rows = ranks.world * q.shape[-3] if options.seqlen is None else options.seqlen
    if ranks.outer is not None:
        if options.layout in LAYOUTS_OF_DOCUMENTS and cu_seqlens is not None:
            raise BadParam(
                f"two dimensions with layout {options.layout!r} and cu_seqlens cannot be compiled: the rows "
                "of a rank depend on the documents; pass layout 'zigzag', or call outside of torch.compile"
            )
        first = ranks.outer_rank * ranks.inner_size
        shards = runs_of(options.layout, (0, int(rows)), ranks.world)
        rows = sum(map(tokens_of, shards[first : first + ranks.inner_size]))
    batch = 1 if cu_seqlens is not None else q.shape[0]
    widths = (split.q_heads, q), (split.kv_heads, k), (split.kv_heads, v), (split.q_heads, v)
    kept = (x.new_empty((rows, batch, heads, x.shape[-1])) for heads, x in widths)
    return out, lse, *kept, q.new_empty((batch, split.q_heads, rows), dtype=torch.float32)


@torch.no_grad()
def run_backward(dout: Tensor, dlse: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    """dq, dk and dv of a shard, and what its rows add to dsinks; an empty tensor without sinks."""
    q, k, v, sinks, slopes, _, dropout_seed, mask_arrays = args[:_COUNT]
    out, lse, of_unit, *rest = args[_COUNT:]
    options = Options(*rest)
    if torch.are_deterministic_algorithms_enabled():
        options = options._replace(deterministic=True)
    mask = options.mask(mask_arrays)
    setting = setting_of(*args[:_TENSORS], mask, options, agree=False)
    packed, group, members = setting.packed, setting.ranks.inner, setting.members
    dout = _batched(dout, packed)
    dlse = None if dlse is None else dlse[None] if packed else dlse
    if group is None:
        arrays = tuple(_batched(x, packed) for x in (q, k, v))
        out, lse = _batched(out, packed), lse[None] if packed else lse
    else:
        *arrays, out, lse = of_unit
        out = out.transpose(0, 1)
        dout = ulysses.to_heads(dout, members, group).transpose(0, 1)
        if dlse is not None:
            dlse = ulysses.to_heads(dlse.transpose(1, 2)[..., None].contiguous(), members, group)
            dlse = dlse[..., 0].permute(1, 2, 0)
    inputs = _of_unit(setting, tuple(arrays), sinks, slopes, dropout_seed, mask)
    results = passes.backward(setting, options, inputs, out, lse, dout, dlse)
    dq, dk, dv = results.dq, results.dk, results.dv
    if group is not None:
        split = setting.split
        # Copies of a kv head are summed in fp32; a head of one rank alone is rounded before it moves.
        dk, dv = (x if split.replicated else x.to(q.dtype) for x in (dk, dv))
        dq, dk, dv = (ulysses.to_tokens(x.transpose(0, 1).contiguous(), members, group) for x in (dq, dk, dv))
        dk, dv = (ulysses.summed(x, split, k.shape[-2]) for x in (dk, dv))
    dsinks = q.new_empty(0)
    if results.dsinks is not None:
        dsinks = torch.zeros_like(sinks, dtype=torch.float32)
        dsinks[setting.q_heads] = results.dsinks
    dq, dk, dv = (x.to(q.dtype).contiguous() for x in (dq, dk, dv))
    return (*((x[0] if packed else x) for x in (dq, dk, dv)), dsinks)


backward = torch.library.custom_op(
    "flashgen::distributed_attention_backward",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor? dlse, {_INPUTS}, Tensor out, Tensor lse, Tensor[] unit, {_OPTIONS}) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
)(run_backward)


@backward.register_fake
def _(dout: Tensor, dlse: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    *gradients, sinks = (None if x is None else x.new_empty(x.shape) for x in args[:4])
    dsinks = dout.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape, dtype=torch.float32)
    return *gradients, dsinks


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.options, ctx.arrays = inputs[_COUNT:], len(inputs[_TENSORS])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:_TENSORS], *output, *inputs[_TENSORS])


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    end = len(saved) - ctx.arrays
    inputs, (out, lse, *of_unit), mask_arrays = saved[:_TENSORS], saved[_TENSORS:end], saved[end:]
    if dout is None:
        dout = torch.zeros_like(out)
    compute = run_backward if is_plain(dout, *inputs[:4]) else backward
    gradients = compute(dout, dlse, *inputs, list(mask_arrays), out, lse, of_unit, *ctx.options)
    dsinks = None if inputs[3] is None else gradients[3]
    *options, numbers = ctx.options
    # PyTorch takes an empty list for one of tensors, and a list of integers for one argument.
    of_numbers = None if numbers else []
    return *gradients[:3], dsinks, *[None] * 3, [None] * ctx.arrays, *[None] * len(options), of_numbers


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    pass


def _refuse_second_derivatives(ctx: Any, *gradients: Tensor) -> None:
    raise BadParam("flashgen does not compute a gradient of attention's gradients (double backward)")


forward.register_autograd(_differentiate, setup_context=_keep)
backward.register_autograd(_refuse_second_derivatives, setup_context=_keep_nothing)
