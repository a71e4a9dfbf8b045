"""The fields of calls of ``attention``, its gradients, ``append``, ``merge`` and ``quantize``, each declared
once.

Signatures, the stub for type checkers, records, PyTorch's schemas, the keys of plans and the names in
messages derive from this table. A new option is a new `Field`, in the place that it has in signatures.
"""

from __future__ import annotations

from flashgen.call.field import BACKWARD, FORWARD, Field, Shorthand
from flashgen.operators.dropout import NO_DROPOUT
from flashgen.operators.maskoptions import NO_WINDOW
from flashgen.operators.splits import AUTO

_NUMBER, _BOUND = "float | None", "int | None"

FIELDS = (
    Field("cache", "host", ("append",), type="KVCache"),
    Field("parts", "host", ("merge",), type="Sequence[tuple[Any, Any]]"),
    Field("x", "array", ("quantize",)),
    Field("per", "name", ("quantize",), default="tensor", type="str"),
    Field("scale", "array", ("quantize",)),
    Field("k_new", "array", ("append",)),
    Field("v_new", "array", ("append",)),
    Field("dout", "array", BACKWARD, elsewhere=("do", "grad_out", "grad_output")),
    Field(
        "q",
        "array",
        (*FORWARD, *BACKWARD, "append"),
        gradient=True,
        doc="""(batch, seqlen_q, num_heads_q, head_dim), or without batch. The dtype is fp16, bf16 or fp32, on
        the CPU also float64, or e4m3 for codes with q_scale. head_dim is at most 256 and a multiple of 8 (of
        4 for fp32, 16 for e4m3). Any strides, but the last dimension is contiguous and rows are 16-byte
        aligned.""",
    ),
    Field(
        "k",
        "array",
        gradient=True,
        doc="""(batch, seqlen_kv, num_heads_kv, head_dim), of the dtype and device of q. num_heads_kv divides
        num_heads_q: query head h reads kv head h // (num_heads_q // num_heads_kv). Or a ``KVCache``; then
        leave v out.""",
    ),
    Field(
        "v",
        "array",
        gradient=True,
        doc="""(batch, seqlen_kv, num_heads_kv, head_dim_v), of the dtype and device of q; head_dim_v may
        differ from head_dim and follows the same rules.""",
    ),
    Field(
        "causal",
        "flag",
        default=False,
        type="bool",
        elsewhere=("is_causal", "use_causal_mask", "causal_mask"),
        doc="hide key j from query i unless j <= i + seqlen_kv - seqlen_q; the same as mask_type 3.",
    ),
    Field(
        "mask",
        "array",
        elsewhere=("attn_mask", "attention_mask", "key_padding_mask", "block_mask", "custom_mask"),
        hint=", which hides where it is nonzero",
        doc="""bool or uint8, nonzero where a key is hidden (as in numpy.ma). Broadcasts from the right, as in
        NumPy, to (batch, num_heads_q, seqlen_q, seqlen_kv); (seqlen_q, seqlen_kv) and (seqlen_kv,) are the
        common shapes. Its last dimension is seqlen_kv itself and contiguous. Or a ``Mask``, by one line,
        which is true where a key is visible; or a ``BlockMask``, lists of the blocks of keys that are
        visible. Combined with causal, mask type 2 or 3, or window_size, a query sees a key if none of them
        hides it.""",
    ),
    Field(
        "mask_type",
        "mask_type",
        type="int | str | None",
        doc="""0 "none", 1 "dense" (mask is given), 2 "causal_top_left" (j <= i), 3 "causal_bottom_right" or
        "causal". None: what the other arguments say.""",
    ),
    Field(
        "window_size",
        "window",
        default=NO_WINDOW,
        type="tuple[int, int]",
        elsewhere=("window", "sliding_window", "window_left", "local_window_size", "attention_window"),
        doc="""(left, right). Query i sees only the keys from p - left to p + right, where
        p = i + seqlen_kv - seqlen_q; -1 is no bound. Not with mask type 2; with 3, right is 0 or -1.""",
    ),
    Field(
        "softmax_scale",
        "number",
        type=_NUMBER,
        elsewhere=("scale", "sm_scale", "scaling", "softmax_scaling", "qk_scale"),
        doc="1 / sqrt(head_dim) if None. Not negative.",
    ),
    Field(
        "softcap",
        "score",
        type=_NUMBER,
        elsewhere=("logits_soft_cap", "attn_logit_softcapping", "logit_cap", "cap"),
        shorthand=Shorthand("cap", "softcap", "softcap", positive=True, without="no cap"),
        doc="replace each scaled score s by softcap tanh(s / softcap), before the mask. Above 0.",
    ),
    Field(
        "alibi_slopes",
        "score",
        # Where no later key is seen the bias is linear, which costs less.
        shorthand=Shorthand("slope", "alibi", "alibi_symmetric"),
        doc="""fp32, (num_heads_q,) or (batch, num_heads_q), contiguous along heads: subtract
        slope |p - j| from the score of query i and key j, with p as for window_size
        (https://arxiv.org/abs/2108.12409). Softcap comes first.""",
    ),
    Field(
        "score",
        "score",
        type="str | Sequence[str] | None",
        elsewhere=("score_mod", "attn_bias", "bias"),
        doc="""the name of a score modification of ``scores.yaml`` in a spec folder, for example in a folder
        of FLASHGEN_SPECS; or a formula, ``"score + bias[b, h, q, kv]"``; or several names and formulas, each
        applied to the result of the one before it.""",
    ),
    Field(
        "params",
        "score",
        type="Mapping[str, Any] | None",
        doc="""the numbers and arrays of ``score``, by name. Other numbers need no new kernel; arrays are of
        the kind and on the device of q.""",
    ),
    Field(
        "sinks",
        "array",
        gradient=True,
        elsewhere=("s_aux", "sink", "attention_sinks", "learnable_sink"),
        doc="""fp32 or bf16, (num_heads_q,), contiguous: an extra logit of each query head. Its exponential is
        added to the denominator of the softmax; it has no value. Neither softmax_scale nor a score
        modification changes it. The LSE includes it: a row that sees no key has a result of 0, and its sink
        as the LSE. -inf means no sink. The gradient is fp32.""",
    ),
    Field(
        "dropout_p",
        "probability",
        default=NO_DROPOUT,
        type="float",
        elsewhere=("dropout", "attention_dropout", "attn_pdrop", "p_dropout"),
        doc="""the probability that a weight is set to 0, at least 0 and less than 1. The other weights are
        multiplied by 1 / (1 - dropout_p). The LSE includes dropped scores. For training: not with a KVCache
        or splits. One random byte decides about a score, as in flash-attn, so the fraction that is kept is
        (floor(255 (1 - dropout_p)) + 1) / 256; a probability for which this is more than 1 % off raises
        BadParam.""",
    ),
    Field(
        "dropout_seed",
        "array",
        elsewhere=("rng_state", "philox_seed", "seed", "generator"),
        doc="""(seed, offset), two integers, or an int64 array of both on the device of q, which the host does
        not read. The same numbers drop the same scores on any device, and in flash-attn as its ``rng_state``.
        None: drawn from torch's generator of the device, also in a CUDA graph. Arrays of other libraries need
        the argument.""",
    ),
    Field(
        "q_scale",
        "array",
        elsewhere=("q_descale", "descale_q", "scale_q"),
        doc="""if q, k and v are e4m3 codes: the factor that turns the codes of q into numbers. fp32: one
        element, (heads,) or (batch, heads), where heads is num_heads_q or num_heads_kv; or as ``quantize``
        returns it per tensor or head. None: 1. Such a call has no KVCache, no dropout and no gradient.""",
    ),
    Field(
        "k_scale",
        "array",
        elsewhere=("k_descale", "descale_k", "scale_k"),
        doc="the same for k; heads is num_heads_kv.",
    ),
    Field(
        "v_scale",
        "array",
        elsewhere=("v_descale", "descale_v", "scale_v"),
        doc="the same for v; heads is num_heads_kv.",
    ),
    Field(
        "dtype",
        "name",
        FORWARD,
        type="str | None",
        doc=""""e4m3": q, k and v are e4m3 codes, as float8_e4m3fn or, for example with CuPy, as uint8. Also
        needed for codes without any scale.""",
    ),
    Field(
        "out_dtype",
        "name",
        FORWARD,
        type="str | None",
        doc="""with e4m3 codes: the dtype of the result, "bf16" (the default), "fp16" or "e4m3". The result is
        the codes times out_scale.""",
    ),
    Field(
        "out_scale",
        "array",
        elsewhere=("scale_o", "output_scale"),
        doc="""with out_dtype "e4m3": fp32, one element, (num_heads_q,) or (batch, num_heads_q). None: 1.
        Results beyond 448 times the scale become 448 times the scale.""",
    ),
    Field(
        "accumulate",
        "name",
        FORWARD,
        type="str | None",
        doc="""with e4m3 codes: how a Hopper kernel sums weights times values. "promoted", the default: the
        tensor core sums at most 128 keys, and these partial sums are added in fp32. "fast": the tensor core
        sums all keys, with 13 bits of fraction. Then sums of values of one sign lose 1.5 % at 1,000 keys and
        25 % at 16,000.""",
    ),
    Field(
        "kv_lengths",
        "array",
        elsewhere=("cache_seqlens", "seqused_k", "seqlens_k", "seqlens_kv", "context_lens", "lengths"),
        doc="""(batch,), int32, on the device of q: sequence b has the keys [0, kv_lengths[b]) of k and v, and
        later rows are not read. Masks and windows align with the end of each sequence, not with seqlen_kv.
        Column j of a dense mask is key j; the mask has max_seqlen_kv columns, by default the capacity of k.
        The host does not read lengths, so a captured graph uses the lengths at its replay.""",
    ),
    Field(
        "kv_starts",
        "array",
        elsewhere=("cache_leftpad", "leftpad_k", "left_padding", "cu_seqlens_k_start"),
        doc="""(batch,), int32, on the device of q: the first key of sequence b is kv_starts[b], from 0 to its
        length. Use it for padding on the left, with kv_lengths on both sides. Earlier keys have no effect,
        even NaN: the result has the same bits as without the padding. Causal masks and windows align with the
        end of the keys; column j of a dense mask is row j of k; in a score keys count from the start. Not
        with packed keys.""",
    ),
    Field(
        "cu_seqlens_q",
        "array",
        elsewhere=("qo_indptr", "query_start_loc", "cu_seqlens"),
        doc="""(batch + 1,), int32, on the device of q: sequences are packed, q and out have the shape
        (tokens, num_heads_q, head_dim), and sequence b has the rows [cu_seqlens_q[b], cu_seqlens_q[b + 1]).
        The first element is 0. Rows of out and of the LSE after the last sequence are not written: new
        arrays may contain NaN there.""",
    ),
    Field(
        "cu_seqlens_kv",
        "array",
        elsewhere=("cu_seqlens_k", "kv_indptr"),
        doc="the same for k and v. Not with kv_lengths.",
    ),
    Field(
        "tree",
        "array",
        elsewhere=("tree_mask", "draft_mask", "spec_decoding_packed_mask", "tree_attn_bias"),
        doc="""int64 on the device of q, a word for each query: (batch, seqlen_q), or (tokens,) if queries are
        packed. The queries of a sequence are the drafts of a tree, up to 64; their keys are the last keys of
        the sequence. Draft i sees all keys before the drafts, and draft j <= i if bit j of its word is set.
        Needs a KVCache or lengths; the host does not read it. Works with window_size, kv_starts, scores and
        sinks, not with gradients.""",
    ),
    Field(
        "indices",
        "array",
        FORWARD,
        elsewhere=("topk_indices", "topk_idxs", "indices_in_kvcache", "sparse_indices"),
        doc="""int32, (batch, seqlen_q, topk), only with a latent ``KVCache``: the tokens that each query
        attends to, in any order, as positions in its sequence from 0 to its length - 1. Entries of -1 are
        skipped. A token that is listed twice counts twice. All heads of a query share the list. For causal
        attention list no token after the query. Rows that are not listed are not read.""",
    ),
    Field(
        "q_rope",
        "array",
        FORWARD,
        elsewhere=("q_pe", "q_rot", "query_rope", "q_pos"),
        doc="""(batch, seqlen_q, num_heads_q, head_dim - head_dim_v), of the dtype and device of q, only with
        a latent ``KVCache``: the elements of q that meet the rotary part of a row. Then q has the first
        head_dim_v elements, which meet the latent. Both have strides of their own. There is no copy.""",
    ),
    # What a BlockMask holds.
    Field("block_indptr", "array", ()),
    Field("block_indices", "array", ()),
    Field("block_size", "block_size", ()),
    # The rows and the pages of a KVCache, and the width of values of a latent one.
    Field("index", "array", ()),
    Field("pages", "array", ()),
    Field("head_dim_v", "host", ()),
    Field("kv_dtype", "name", ()),
    # If a call has some rows of a sequence: the row of random numbers of its first query.
    Field("dropout_row", "host", ()),
    # "fp32" if the caller adds dk and dv of several calls.
    Field("dkv_dtype", "name", ()),
    Field(
        "max_seqlen_q",
        "bound",
        type=_BOUND,
        elsewhere=("max_query_len", "max_seqlen"),
        doc="""no sequence has more queries; decides kernel and grid. Default: the size of the arrays. Rows
        past it may stay unwritten.""",
    ),
    Field(
        "max_seqlen_kv",
        "bound",
        type=_BOUND,
        elsewhere=("max_seqlen_k", "max_seq_len"),
        doc="the same for keys, with the tokens of append.",
    ),
    Field(
        "splits",
        "splits",
        FORWARD,
        default=AUTO,
        type="str | int | SplitEvery",
        elsewhere=("num_splits",),
        doc="""into how many parts the keys of a sequence are split, which thread blocks compute in parallel.
        "auto": the fastest choice for the batch and the GPU. An integer n: n parts with the same number of KV
        blocks, rounded up, or fewer for short sequences; 1: no split. ``SplitEvery(keys)``: parts of that
        many keys. With an integer or SplitEvery the bits of a sequence do not depend on its batch. Only
        decoding kernels split (fp16 and bf16, few rows). For other calls n above 1 raises BadParam, and
        SplitEvery does not split.""",
    ),
    Field(
        "sm_margin",
        "margin",
        FORWARD,
        default=0,
        type="int",
        doc="""how many multiprocessors of the GPU a kernel leaves to other kernels, for example to NCCL:
        persistent kernels start fewer thread blocks. The result does not change. No effect on other kernels,
        latent caches, gradients and the CPU.""",
    ),
    Field(
        "append",
        "host",
        FORWARD,
        type="tuple[Any, Any] | None",
        doc="""(k_new, v_new): new tokens, which the call writes into the KVCache after the keys of each
        sequence, as ``flashgen.append`` does, before it attends. For a latent cache v_new is None. With
        cu_seqlens_q the new tokens are packed, too. The call does not change the lengths of the cache.""",
    ),
    Field(
        "rotary",
        "host",
        (*FORWARD, "append"),
        type="Rotary | None",
        elsewhere=("rotary_cos", "rotary_sin", "rotary_emb"),
        doc="""a ``Rotary``, only with append: rotates the new keys to their positions, and also q. With
        causal or a window query i is rotated to the position of new token i, so there must be as many queries
        as new tokens. Otherwise all queries are rotated to the position of the first new token. Several
        queries with only a dense mask need ``positions`` of the Rotary.""",
    ),
    Field("q_positions", "name", ("append",), default="each", type="str"),
    Field("cu_seqlens_new", "array", ("append",), elsewhere=("cu_seqlens_q", "append_indptr")),
    Field(
        "out",
        "array",
        (*FORWARD, *BACKWARD, "merge", "quantize"),
        elsewhere=("output", "o"),
        doc="""the result is written here: (batch, seqlen_q, num_heads_q, head_dim_v), or without batch, of
        the dtype and device of q, in memory that no other argument uses. Not for JAX, whose arrays cannot be
        written to.""",
    ),
    Field("lse_out", "array", ("merge",), elsewhere=("out_lse", "lse")),
    Field("lse", "array", BACKWARD),
    Field("dlse", "array", BACKWARD, elsewhere=("grad_lse",)),
    Field(
        "return_lse",
        "flag",
        FORWARD,
        default=False,
        type="bool",
        elsewhere=("return_softmax_lse", "return_attn_probs", "lse"),
        doc="""also return the logarithm (base e) of each row's sum of exponentials: fp32,
        (batch, num_heads_q, seqlen_q), or without batch; (num_heads_q, tokens) where queries are packed.""",
    ),
    Field(
        "return_weights",
        "host",
        FORWARD,
        default=False,
        type="bool",
        elsewhere=("need_weights", "output_attentions", "return_attention_weights"),
        doc="""also return the attention weights, softmax of the masked scores, as the last result: fp32,
        (batch, num_heads_q, seqlen_q, seqlen_kv), or without batch. For tests and teaching: this takes
        O(seqlen_q * seqlen_kv) memory for each head, and a second pass over q and k. A hidden key has the
        weight 0. Weights have no gradient. Not with lengths or a KVCache.""",
    ),
    Field(
        "deterministic",
        "flag",
        ("attention", *BACKWARD),
        default=False,
        type="bool",
        doc="""gradients have the same bits each time, as under torch.use_deterministic_algorithms.""",
    ),
    Field("dparams", "host", ("attention_backward",), type="Sequence[str] | None"),
    Field("workspace", "host", ("attention_backward",)),
    Field(
        "stream",
        "host",
        ("attention", "attention_backward", "append", "merge", "quantize"),
        elsewhere=("cuda_stream",),
        doc="""where to queue the work: a CuPy or PyTorch stream, a CUDA handle, or None for the current
        stream of the library of q. JAX arrays go through DLPack on CuPy's current stream, and inside jax.jit
        work is on XLA's stream. Nothing synchronises, and a CUDA graph can capture the call once its kernel
        is loaded. Arrays of another stream must outlive the work.""",
    ),
    Field(
        "backend",
        "name",
        (*FORWARD, *BACKWARD, "append", "merge", "quantize"),
        type="str | None",
        doc=""""cuda", "cpu", or "simulator", which slowly runs the generated CUDA on arrays in host memory
        and raises SimulationError for errors of the kernel; None: FLASHGEN_BACKEND, or by the device of the
        arrays.""",
    ),
    Field(
        "algorithm",
        "name",
        FORWARD,
        type="str | None",
        doc=""""naive", "v1", "v2" or "v3": only kernels of this algorithm. naive keeps all scores in memory,
        v1 is FlashAttention-1; v2 are the kernels for every GPU since Ampere, v3 the kernels for Hopper.
        None: the fastest. Results differ only in rounding. The CPU path checks the name and ignores it.""",
    ),
)
# The arrays that have gradients, in the order of the backward pass, and what receives these gradients.
DIFFERENTIABLE = tuple(field.name for field in FIELDS if field.gradient)
GRADIENTS = tuple(f"d{name}" for name in DIFFERENTIABLE)
_AFTER = next(place for place, field in enumerate(FIELDS, 1) if field.name == "dlse")
FIELDS = (*FIELDS[:_AFTER], *(Field(name, "array", BACKWARD) for name in GRADIENTS), *FIELDS[_AFTER:])
BY_NAME = {field.name: field for field in FIELDS}
SHORTHANDS = tuple((field.name, field.shorthand) for field in FIELDS if field.shorthand)
# The fields that hold a BlockMask.
OF_BLOCK_MASK = ("block_indptr", "block_indices", "block_size")
SCORES = tuple(field.name for field in FIELDS if field.kind == "score")
# The fields of calls whose q, k and v are e4m3 codes.
OF_CODES = ("q_scale", "k_scale", "v_scale", "dtype", "out_dtype", "out_scale", "accumulate")
# The arrays that say which rows each sequence has.
LENGTHS = ("kv_lengths", "kv_starts", "cu_seqlens_q", "cu_seqlens_kv")
# Keywords of calls and plans that are not arguments of attention's operators. A plan takes the parameters of
# a score modification as keywords, so no parameter may have one of these names.
PLAN_KEYWORDS = frozenset(
    (
        *(x.name for x in FIELDS if x.kind == "host" and {*FORWARD, *BACKWARD} & {*x.functions}),
        *("backend", "cache", "total_lengths", "q_rotated"),
    )
)
