"""``torch.nn.attention.flex_attention.flex_attention``, under its signature: its functions become a mask by a
line and a formula of the score.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flashgen.call.mask import Mask
from flashgen.compat.torch_traced import Sizes, formula_of, line_of
from flashgen.compat.widths import attention_of_any_width
from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, FlashgenError, arg
from flashgen.operators.arguments import flag

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask

_NAMES = {"q": "query", "k": "key", "v": "value", "softmax_scale": "scale", "mask": "block_mask"}
_NAMES |= {"score": "score_mod", "line": "mask_mod"}
# BlockMasks whose lists do not contradict their mask_mod.
_compared: weakref.WeakKeyDictionary[BlockMask, bool] = weakref.WeakKeyDictionary()


@torch.compiler.disable
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of query, (batch, heads, seqlen_q, E), on key and value, (batch or 1, kv_heads, seqlen_kv,
    E), with the functions of FlexAttention.

    They are called once in each call of this function, to write down what they compute. A captured tensor is
    a parameter, so its elements may change; a Python number is a part of the kernel. What a function may use
    is in the error of what it may not: there is no slower path.

    score_mod: ``(score, b, h, q_idx, kv_idx)`` -> a score. An index must be within the tensor. Captured
        tensors that require a gradient get it, but not beside a block_mask.
    block_mask: a BlockMask with a mask_mod, or that function ``(b, h, q_idx, kv_idx)`` itself. The lists of a
        BlockMask are not read, but compared with mask_mod when it is first used, which waits for the GPU.
        Lists by ``from_kv_blocks`` alone are a ``flashgen.BlockMask``.
    kernel_options: has no effect.

    Returns out, (batch, heads, seqlen_q, Ev), and with return_lse the natural log-sum-exp, (batch, heads,
    seqlen_q). Raises BadParam for a function that cannot be written down, and for lists that contradict
    mask_mod; BadTensorShape and BadTensorDtype for tensors; what ``flashgen.attention`` raises.
    """
    for name, x in {"query": query, "key": key, "value": value}.items():
        if not isinstance(x, torch.Tensor):
            raise BadTensorDtype(f"{arg(name)} has type {type(x).__name__}; expected a torch.Tensor")
        if x.dim() != 4:
            raise BadTensorShape(
                f"{arg(name)} has shape {tuple(x.shape)}; expected (batch, heads, seqlen, E)"
            )
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads != kv_heads and not flag("enable_gqa", enable_gqa):
        raise BadTensorShape(
            f"query has {heads} heads and key has {kv_heads}; pass enable_gqa=True if heads share keys"
        )
    if key.shape[0] == 1 != query.shape[0]:
        key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    sizes = Sizes(query.shape[0], heads, query.shape[2], key.shape[2])
    options: dict[str, Any] = {}
    if score_mod is not None:
        formula = formula_of(score_mod, sizes)
        if formula.text != "score":
            options |= {"score": formula.text, "params": formula.params}
    if block_mask is not None:
        options["mask"] = mask_of(block_mask, sizes)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    try:
        result = attention_of_any_width(q, k, v, softmax_scale=scale, return_lse=return_lse, **options)
    except FlashgenError as error:
        error.rename(_NAMES)
        raise
    if not return_lse:
        return result.transpose(1, 2)
    out, lse = result
    return out.transpose(1, 2), lse


def mask_of(block_mask: Any, sizes: Sizes) -> Mask:
    """The mask by a line of a BlockMask of PyTorch, or of a mask_mod. Raises BadParam and BadTensorShape."""
    from torch.nn.attention.flex_attention import BlockMask, noop_mask

    mask_mod = block_mask
    if isinstance(block_mask, BlockMask):
        mask_mod = block_mask.mask_mod
        if mask_mod is None or mask_mod is noop_mask:
            raise BadParam(
                f"{arg('block_mask')} has no mask_mod; pass None for no mask, and lists of blocks "
                "as a flashgen.BlockMask to flashgen.attention"
            )
        lengths = sizes.seqlen_q, sizes.seqlen_kv
        if tuple(block_mask.shape[-2:]) != lengths:
            raise BadTensorShape(
                f"{arg('block_mask')} is of {block_mask.shape[-2]} queries and {block_mask.shape[-1]} keys; "
                f"query and key have {lengths[0]} and {lengths[1]}"
            )
    elif not callable(block_mask):
        raise BadParam(
            f"{arg('block_mask')} has type {type(block_mask).__name__}; expected a BlockMask of PyTorch, or "
            "its mask_mod"
        )
    line = line_of(mask_mod, sizes)
    if line.text in ("True", "False"):
        line = line._replace(text="0 <= kv" if line.text == "True" else "kv < 0")
    try:
        mask = Mask(line.text, **line.params)
    except FlashgenError as error:
        error.rename(_NAMES)
        raise
    if mask_mod is not block_mask and block_mask not in _compared:
        _check_lists(block_mask, mask, sizes)
        _compared[block_mask] = True
    return mask


def _check_lists(block_mask: BlockMask, mask: Mask, sizes: Sizes) -> None:
    """Raise BadParam where the lists of a BlockMask hide a key that its mask_mod shows, or show one that it
    hides.
    """
    from flashgen.operators.maskblocks import FULL, PARTIAL
    from flashgen.operators.visibility import visibility_on_host

    rows, keys = block_mask.BLOCK_SIZE
    lengths = {"seqlen_q": sizes.seqlen_q, "seqlen_kv": sizes.seqlen_kv}
    blocks = mask.blocks(rows, keys, num_heads=sizes.num_heads, **lengths)
    host = {name: x.detach().cpu().numpy() for name, x in mask.arrays.items()}
    of_call = {"batch": sizes.batch, "num_heads_q": sizes.num_heads, **lengths}
    visibility = visibility_on_host(mask.rule, host, of_call)
    listed = np.where(_dense(block_mask.full_kv_num_blocks, block_mask.full_kv_indices), FULL, 0)
    partial = _dense(block_mask.kv_num_blocks, block_mask.kv_indices)
    listed = np.where(partial, PARTIAL, listed)[..., : blocks.num_row_blocks, : blocks.num_key_blocks]
    lists = (sizes.batch if visibility.reads_batch else 1, sizes.num_heads if visibility.reads_head else 1)
    lists = tuple(max(mine, theirs) for mine, theirs in zip(lists, listed.shape[:2], strict=True))
    for b, h in np.ndindex(*lists):
        theirs = listed[min(b, listed.shape[0] - 1), min(h, listed.shape[1] - 1)]
        for i, j in np.argwhere(theirs != blocks.verdicts(b, h)):
            if theirs[i, j] == PARTIAL:  # whose scores mask_mod decides
                continue
            queries = np.arange(i * rows, min((i + 1) * rows, sizes.seqlen_q))[:, None]
            at = np.arange(j * keys, min((j + 1) * keys, sizes.seqlen_kv))
            hidden = visibility.hides(b, h, queries, at)
            if np.any(hidden if theirs[i, j] == FULL else ~hidden):
                what = "lists" if theirs[i, j] == FULL else "leaves out"
                raise BadParam(
                    f"{arg('block_mask')} {what} key block {j} for query block {i}, against its mask_mod; "
                    "make it by create_block_mask, or say all of the mask in mask_mod"
                )


def _dense(counts: Tensor | None, indices: Tensor | None) -> Any:
    """Lists of a BlockMask as bools: (batch, heads, blocks of queries, blocks of keys)."""
    if counts is None or indices is None:
        return np.zeros((1, 1, 1, 1), bool)
    counts, indices = counts.cpu().numpy(), indices.cpu().numpy()
    dense = np.zeros(indices.shape, bool)
    listed = np.arange(indices.shape[-1]) < counts[..., None]
    *leading, _ = np.nonzero(listed)
    dense[(*leading, indices[listed])] = True
    return dense
