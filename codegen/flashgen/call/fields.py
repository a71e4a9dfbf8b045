"""The fields of calls of ``attention``, its gradients, ``append``, ``merge`` and ``quantize``, each declared
once.

Signatures, the stub for type checkers, records, PyTorch's schemas, the keys of plans and the names in
messages derive from this table. A new option is a new `Field`, in the place that it has in signatures.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from flashgen.operators.dropout import NO_DROPOUT
from flashgen.operators.maskoptions import NO_WINDOW
from flashgen.operators.splits import AUTO

if TYPE_CHECKING:
    from collections.abc import Sequence

FORWARD = ("attention", "plan")
BACKWARD = ("attention_backward", "plan_backward")

# What a value is, which decides how it is checked and how a schema of PyTorch holds it.
Kind = Literal[
    "array",  # of any library
    "flag",
    "number",  # that kernels take as a scalar
    "probability",
    "mask_type",  # one of `maskoptions.MASK_TYPES`
    "window",  # two integers
    "bound",  # of the lengths of sequences
    "splits",
    "block_size",  # rows and keys of the blocks of a BlockMask
    "score",  # a score modification: its names, its parameters, or shorthand for one
    "name",  # a string that is looked up
    "host",  # only for the host: where to queue, which memory to use, what to do beforehand
]


@dataclass(frozen=True, slots=True)
class Shorthand:
    """What a field of the kind "score" stands for: the parameter ``param`` of the score modification
    ``causal``, if no query sees a key after its own position, else of ``other``. ``positive`` is whether it
    is a number above 0; ``without`` says in messages what None means.
    """

    param: str
    causal: str
    other: str
    positive: bool = False
    without: str = ""


@dataclass(frozen=True, slots=True)
class Field:
    """One argument of a call.

    functions: which functions take it; none takes what a KVCache holds.
    type: for type checkers.
    gradient: whether the backward pass gives a gradient of the array, which has the field ``dNAME``.
    elsewhere: what other libraries call it.
    hint: what to add where one of these names was used.
    """

    name: str
    kind: Kind
    functions: tuple[str, ...] = FORWARD + BACKWARD
    default: Any = None
    type: str = "Any"
    gradient: bool = False
    elsewhere: tuple[str, ...] = ()
    hint: str = ""
    shorthand: Shorthand | None = None
    doc: str = ""


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
        doc="""(batch, seqlen_q, num_heads_q, head_dim), or without batch; fp16, bf16 or fp32, and on the CPU
        path float64. head_dim is at most 256 and a multiple of 8 (of 4 for fp32). Any strides, but the last
        dimension is contiguous and rows are 16-byte aligned.""",
    ),
    Field(
        "k",
        "array",
        gradient=True,
        doc="""(batch, seqlen_kv, num_heads_kv, head_dim), of the dtype and device of q. num_heads_kv divides
        num_heads_q: query head h reads kv head h // (num_heads_q // num_heads_kv). Or a ``KVCache``, without
        v.""",
    ),
    Field(
        "v",
        "array",
        gradient=True,
        doc="""(batch, seqlen_kv, num_heads_kv, head_dim_v), of the dtype and device of q; head_dim_v may
        differ from head_dim and is bound by the same rules.""",
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
        visible. With causal, mask types 2 and 3, or window_size both hold: a query sees a key that neither
        hides.""",
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
        doc="""the numbers and arrays of ``score``, by name. Numbers may differ from call to call without
        compiling anew; arrays are of the kind and on the device of q.""",
    ),
    Field(
        "sinks",
        "array",
        gradient=True,
        elsewhere=("s_aux", "sink", "attention_sinks", "learnable_sink"),
        doc="""fp32 or bf16, (num_heads_q,), contiguous: a logit of each query head that joins the denominator
        of its softmax, and has no value. It is in natural units: softmax_scale and a score do not change it.
        The LSE counts it in: a row that sees no key has a result of 0, and its sink as the LSE. -inf stands
        for no sink. The gradient is fp32.""",
    ),
    Field(
        "dropout_p",
        "probability",
        default=NO_DROPOUT,
        type="float",
        elsewhere=("dropout", "attention_dropout", "attn_pdrop", "p_dropout"),
        doc="""the probability that dropout drops a score from the sum of values, from 0 up to but not 1. The
        others are multiplied by 1 / (1 - dropout_p). The LSE counts all scores. For
        training: not with a KVCache or splits. A score has one random byte, as in flash-attn, so
        (floor(255 (1 - dropout_p)) + 1) / 256 of them count; a probability for which this is more than 1 %
        off is refused.""",
    ),
    Field(
        "dropout_seed",
        "array",
        elsewhere=("rng_state", "philox_seed", "seed", "generator"),
        doc="""(seed, offset), two integers, or an int64 array of them on the device of q, read there. Equal
        numbers drop equal scores, on any device and in any tile: those that flash-attn drops for the same
        ``rng_state``. None: PyTorch tensors draw both from torch's generator of their device, also in a CUDA
        graph; arrays of other libraries need them.""",
    ),
    Field(
        "kv_lengths",
        "array",
        elsewhere=("cache_seqlens", "seqused_k", "seqlens_k", "seqlens_kv", "context_lens", "lengths"),
        doc="""(batch,), int32, on the device of q: sequence b has the keys [0, kv_lengths[b]) of k and v, and
        the rows after them are not read. Masks and windows align with the end of each sequence, not with
        seqlen_kv; column j of a dense mask is key j, and there are as many columns as max_seqlen_kv, or k has
        room for. Nothing on the host reads lengths, so a captured graph takes the lengths of its replay.""",
    ),
    Field(
        "kv_starts",
        "array",
        elsewhere=("cache_leftpad", "leftpad_k", "left_padding", "cu_seqlens_k_start"),
        doc="""(batch,), int32, on the device of q: the keys of sequence b begin with kv_starts[b], 0 to its
        length: k and v have padding on the left, or on both sides with kv_lengths. Earlier keys have no
        effect, whatever their bits. The call has the result of one whose k and v begin there, to the bit.
        Causal masks and windows align with the end of the keys, as without; column j of a dense mask is row
        j of k; in a score keys count from the start. Not with packed keys.""",
    ),
    Field(
        "cu_seqlens_q",
        "array",
        elsewhere=("qo_indptr", "query_start_loc", "cu_seqlens"),
        doc="""(batch + 1,), int32, on the device of q: sequences are packed, q and out have the shape
        (tokens, num_heads_q, head_dim), and sequence b has the rows [cu_seqlens_q[b], cu_seqlens_q[b + 1]).
        The first element is 0. Rows of out and of the LSE after the last sequence are not written: in new
        arrays they may be anything, NaN included.""",
    ),
    Field(
        "cu_seqlens_kv",
        "array",
        elsewhere=("cu_seqlens_k", "kv_indptr"),
        doc="the same for k and v. Not with kv_lengths.",
    ),
    # What a BlockMask holds.
    Field("block_indptr", "array", ()),
    Field("block_indices", "array", ()),
    Field("block_size", "block_size", ()),
    # The rows and the pages of a KVCache.
    Field("index", "array", ()),
    Field("pages", "array", ()),
    Field(
        "max_seqlen_q",
        "bound",
        type=_BOUND,
        elsewhere=("max_query_len", "max_seqlen"),
        doc="""a bound of the lengths of queries, which fixes grids; by default what the arrays hold. Rows of
        a sequence past max_seqlen_q may stay unwritten.""",
    ),
    Field(
        "max_seqlen_kv",
        "bound",
        type=_BOUND,
        elsewhere=("max_seqlen_k", "max_seq_len"),
        doc="the same for keys; it counts the tokens of append.",
    ),
    Field(
        "splits",
        "splits",
        FORWARD,
        default=AUTO,
        type="str | int | SplitEvery",
        elsewhere=("num_splits",),
        doc="""into how many parts the keys of a sequence are split, to be computed side by side and combined.
        "auto": as suits the batch and the GPU, or not at all. An integer n: n parts of equally many KV
        blocks, rounded up, so fewer where there are few; 1: none is split. ``SplitEvery(keys)``: parts of
        that many keys. With both the bits of a sequence do not depend on its batch. n above 1 needs a
        decoding kernel (fp16 and bf16, few rows); SplitEvery splits where there is one.""",
    ),
    Field(
        "append",
        "host",
        FORWARD,
        type="tuple[Any, Any] | None",
        doc="""(k_new, v_new), to be written into the KVCache before the attention, after the keys that each
        sequence has there: ``flashgen.append``. With cu_seqlens_q they are packed alike. The lengths of the
        cache stay as they are; the caller adds the new tokens to them.""",
    ),
    Field(
        "rotary",
        "host",
        (*FORWARD, "append"),
        type="Rotary | None",
        elsewhere=("rotary_cos", "rotary_sin", "rotary_emb"),
        doc="""a ``Rotary``, with append: rotates the new keys to their positions on the way into the cache,
        and q: query i to the position of new token i where a later key may be hidden (causal or a window), of
        which there are as many, else to the position of the first one. Several queries with a dense mask
        alone need its ``positions``.""",
    ),
    Field("q_positions", "name", ("append",), default="each", type="str"),
    Field("cu_seqlens_new", "array", ("append",), elsewhere=("cu_seqlens_q", "append_indptr")),
    Field(
        "out",
        "array",
        (*FORWARD, *BACKWARD, "merge", "quantize"),
        elsewhere=("output", "o"),
        doc="""receives the result: (batch, seqlen_q, num_heads_q, head_dim_v), or without batch, of the dtype
        and device of q, in memory that no other argument touches. Not for JAX, whose arrays cannot be written
        to.""",
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
        weight 0, and so has each key of a row that sees none. Weights have no gradient. Not with lengths,
        nor with a KVCache.""",
    ),
    Field(
        "deterministic",
        "flag",
        ("attention", *BACKWARD),
        default=False,
        type="bool",
        doc="""of gradients: they are the same bits each time, as in ``attention_backward``, and also under
        torch.use_deterministic_algorithms. The result always is.""",
    ),
    Field("dparams", "host", ("attention_backward",), type="Sequence[str] | None"),
    Field("workspace", "host", ("attention_backward",)),
    Field(
        "stream",
        "host",
        ("attention", "attention_backward", "append", "merge", "quantize"),
        elsewhere=("cuda_stream",),
        doc="""where to queue the work: a CuPy or PyTorch stream, a CUDA handle, or None for the current
        stream of the library of q. JAX has no public stream: its arrays are handed over by DLPack, both ways,
        on CuPy's current stream; inside jax.jit work is on XLA's stream. Nothing waits for the GPU, and the
        call can be captured in a CUDA graph once its kernel is loaded. As with all queued work, arrays of
        another stream must outlive it.""",
    ),
    Field(
        "backend",
        "name",
        (*FORWARD, *BACKWARD, "append", "merge", "quantize"),
        type="str | None",
        doc=""""cuda", "cpu", or "simulator", which slowly runs the generated CUDA on arrays in host memory
        and raises SimulationError where it does what a GPU forbids; None: FLASHGEN_BACKEND, or what the
        arrays' device asks for.""",
    ),
    Field(
        "algorithm",
        "name",
        FORWARD,
        type="str | None",
        doc=""""naive", "v1", "v2" or "v3": only kernels of this one. naive keeps all scores in memory, v1 is
        FlashAttention-1; v2 are the kernels for every GPU since Ampere, v3 the kernels for Hopper. None: the
        fastest. Results differ only in rounding. The CPU path checks the name and ignores it.""",
    ),
)
# The arrays that have gradients, in the order of the backward pass, and what receives these gradients.
DIFFERENTIABLE = tuple(field.name for field in FIELDS if field.gradient)
GRADIENTS = tuple(f"d{name}" for name in DIFFERENTIABLE)
_AFTER = next(place for place, field in enumerate(FIELDS, 1) if field.name == "dlse")
FIELDS = (*FIELDS[:_AFTER], *(Field(name, "array", BACKWARD) for name in GRADIENTS), *FIELDS[_AFTER:])
BY_NAME = {field.name: field for field in FIELDS}
# The arguments that come by position; the first ones there must be.
POSITIONAL = {
    "attention": ("q", "k", "v"),
    "plan": ("q", "k", "v"),
    "attention_backward": ("dout", "q", "k", "v", "out", "lse"),
    "plan_backward": ("dout", "q", "k", "v", "out", "lse"),
    "append": ("cache", "k_new", "v_new"),
    "merge": ("parts",),
    "quantize": ("x", "per"),
}
REQUIRED = {
    "attention": 2,
    "plan": 2,
    "attention_backward": 6,
    "plan_backward": 6,
    "append": 3,
    "merge": 1,
    "quantize": 1,
}
SHORTHANDS = tuple((field.name, field.shorthand) for field in FIELDS if field.shorthand)
# What calls and their gradients have of a BlockMask.
OF_BLOCK_MASK = ("block_indptr", "block_indices", "block_size")
# The arrays that say which rows each sequence has.
LENGTHS = ("kv_lengths", "kv_starts", "cu_seqlens_q", "cu_seqlens_kv")
# What calls and plans, also with append=, take by name beside the arguments of the operators of attention: a
# plan takes the parameters of a score modification by name, too, so none of them may have such a name.
PLAN_KEYWORDS = frozenset(
    (
        *(x.name for x in FIELDS if x.kind == "host" and {*FORWARD, *BACKWARD} & {*x.functions}),
        *("backend", "cache", "total_lengths", "q_rotated"),
    )
)


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: "q, k and v"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


@cache
def parameters(function: str) -> tuple[Field, ...]:
    """The fields that a function takes, in the order of its signature: by position, then by name."""
    first = POSITIONAL[function]
    rest = (x for x in FIELDS if function in x.functions and x.name not in first)
    return (*(BY_NAME[name] for name in first), *rest)


@cache
def defaults(function: str) -> dict[str, Any]:
    """The parameters of a function by name, with their defaults; None where there is none."""
    return {field.name: field.default for field in parameters(function)}
