"""The front door: ``attention`` and ``plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Never, overload

from flashgen.api.asked import LENGTHS, asked, names_given
from flashgen.api.calls import call_of, make_plan, planning
from flashgen.api.keywords import unexpected
from flashgen.api.kvcache import KVCache
from flashgen.errors import FlashgenError, naming, rename
from flashgen.operators.arguments import flag
from flashgen.operators.maskoptions import NO_WINDOW
from flashgen.runtime import arrays, torchkind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashgen.api.append import AppendPlan
    from flashgen.api.asked import Asked
    from flashgen.api.kvcache import Rotary
    from flashgen.operators.splits import Splits
    from flashgen.runtime.plans import Plan


def attention(
    q: Any,
    k: Any,
    v: Any = None,
    *,
    causal: bool = False,
    mask: Any = None,
    mask_type: int | str | None = None,
    window_size: tuple[int, int] = NO_WINDOW,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    score: str | Sequence[str] | None = None,
    params: Mapping[str, Any] | None = None,
    kv_lengths: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    splits: Splits = "auto",
    append: tuple[Any, Any] | None = None,
    rotary: Rotary | None = None,
    out: Any = None,
    return_lse: bool = False,
    deterministic: bool = False,
    stream: Any = None,
    backend: str | None = None,
    algorithm: str | None = None,
    **unknown: Never,
) -> Any:
    """softmax(q k^T * softmax_scale, masked) v, exactly, without the matrix of scores.

    Arrays may be of CuPy, NumPy, PyTorch, JAX, or of any library with DLPack or ``__cuda_array_interface__``;
    none is copied. All arrays of a call are of one library; beside those of JAX, which cannot be written to,
    a KVCache may be of another. NumPy arrays, and others in host memory, are computed on the CPU.

    q: (batch, seqlen_q, num_heads_q, head_dim), or without batch; fp16, bf16 or fp32. head_dim is at most 256
        and a multiple of 8 (of 4 for fp32). Any strides, but the last dimension is contiguous and rows are
        16-byte aligned.
    k: (batch, seqlen_kv, num_heads_kv, head_dim), of the dtype and device of q. num_heads_kv divides
        num_heads_q: query head h reads kv head h // (num_heads_q // num_heads_kv). Or a ``KVCache``, without
        v.
    v: (batch, seqlen_kv, num_heads_kv, head_dim_v), likewise; head_dim_v may be another than head_dim and is
        bound by the same rules.
    causal: hide key j from query i unless j <= i + seqlen_kv - seqlen_q; the same as mask_type 3.
    mask: bool or uint8, nonzero where a key is hidden (as in numpy.ma). Broadcasts from the right, as in
        NumPy, to (batch, num_heads_q, seqlen_q, seqlen_kv); (seqlen_q, seqlen_kv) and (seqlen_kv,) are the
        common shapes. Its last dimension is seqlen_kv itself and contiguous. With causal, mask types 2 and 3,
        or window_size both hold: a query sees a key that neither hides.
    mask_type: 0 "none", 1 "dense" (mask is given), 2 "causal_top_left" (j <= i), 3 "causal_bottom_right" or
        "causal". None: what the other arguments say.
    window_size: (left, right). Query i sees only the keys from p - left to p + right, where
        p = i + seqlen_kv - seqlen_q; -1 is no bound. Not with mask type 2; with 3, right is 0 or -1.
    softmax_scale: 1 / sqrt(head_dim) if None. Not negative.
    softcap: replace each scaled score s by softcap tanh(s / softcap), before the mask. Above 0.
    alibi_slopes: fp32, (num_heads_q,) or (batch, num_heads_q), contiguous along heads: subtract
        slope |p - j| from the score of query i and key j, with p as for window_size
        (https://arxiv.org/abs/2108.12409). Softcap comes first.
    score: the name of a score modification of ``scores.yaml`` in a spec folder, such as those of
        FLASHGEN_SPECS, or several names, of which each takes the scores that the one before it made.
    params: the numbers and arrays of ``score``, by name. Numbers may differ from call to call without
        compiling anew; arrays are of the kind and on the device of q.
    kv_lengths: (batch,), int32, on the device of q: sequence b has the keys [0, kv_lengths[b]) of k and v,
        and what lies behind them is not read. Masks and windows align with the end of each sequence, in
        place of seqlen_kv; column j of a dense mask is key j, and there are as many columns as
        max_seqlen_kv, or k has room for. Nothing on the host reads lengths, so a captured graph takes those
        of its replay.
    cu_seqlens_q: (batch + 1,), int32, on the device of q: sequences are packed, q and out have the shape
        (tokens, num_heads_q, head_dim), and sequence b has the rows [cu_seqlens_q[b], cu_seqlens_q[b + 1]).
        The first element is 0. Rows of out and of the LSE behind the last sequence are not written: in new
        arrays they may be anything, NaN included.
    cu_seqlens_kv: the same for k and v. Not with kv_lengths.
    max_seqlen_q, max_seqlen_kv: bounds of the lengths of sequences, which fix grids; by default what the
        arrays hold. Rows of a sequence past max_seqlen_q may stay unwritten. max_seqlen_kv counts the tokens
        of append.
    splits: into how many parts the keys of a sequence are split, to be computed side by side and combined.
        "auto": as suits the batch and the GPU, or not at all. An integer n: n parts of equally many KV
        blocks, rounded up, so fewer where there are few; 1: none is split. ``SplitEvery(keys)``: parts of so
        many keys. With both the bits of a sequence do not depend on its batch. n above 1 needs a decoding
        kernel (fp16 and bf16, few rows); SplitEvery splits where there is one.
    append: (k_new, v_new), to be written into the KVCache ahead of the attention, behind the keys that each
        sequence has there: ``flashgen.append``. With cu_seqlens_q they are packed alike. The lengths of the
        cache stay as they are; the caller adds the new tokens to them.
    rotary: a ``Rotary``, with append: rotates the new keys to their positions on the way into the cache, and
        q: query i to the position of new token i where a later key may be hidden (causal or a window), of
        which there are as many, else to that of the first one. Several queries with a dense mask alone need
        its ``positions``.
    out: receives the result: (batch, seqlen_q, num_heads_q, head_dim_v), or without batch, of the dtype and
        device of q, in memory that no other argument touches. Not for JAX, whose arrays cannot be written to.
    return_lse: also return the logarithm (base e) of each row's sum of exponentials: fp32,
        (batch, num_heads_q, seqlen_q), or without batch; (num_heads_q, tokens) where queries are packed.
    deterministic: of gradients: they are the same bits each time, as in ``attention_backward``; so they are
        under torch.use_deterministic_algorithms. The result always is.
    stream: where to queue the work: a CuPy or PyTorch stream, a CUDA handle, or None for the current stream
        of the library of q. JAX has no public stream: its arrays are handed over by DLPack, both ways, on
        CuPy's current stream. Nothing waits for the GPU, and the call can be captured in a CUDA graph once
        its kernel is loaded. As with all queued work, arrays of another stream must outlive it.
    backend: "cuda", "cpu", or "simulator", which slowly runs the generated CUDA on arrays in host memory and
        raises SimulationError where it does what a GPU forbids; None: FLASHGEN_BACKEND, or what the arrays'
        device asks for.
    algorithm: "naive", "v1", "v2" or "v3": only kernels of this one. naive keeps all scores in memory, v1 is
        FlashAttention-1; v2 are the kernels for every GPU since Ampere, v3 those for Hopper. None: the
        fastest. Results differ only in rounding. The CPU path checks the name and ignores it.

    Returns ``out``, of the kind of q, or ``(out, lse)``. A row that sees no key is 0, with an LSE of -inf.
    Finite scores give finite results, whatever their size. Where all that a row sees has scaled scores beyond
    1e7 in size in fp16, 1e9 in bf16 and fp32, as a finite mask of -1e10 makes them, fp32 no longer tells them
    apart: a GPU may give 0 for that row, with an LSE of -inf, in place of a mean of v.

    Where a tensor of PyTorch, q, k or v, requires a gradient, autograd records the call. It refuses one with
    out, stream or a KVCache, and a mask or an array of a score that requires a gradient itself. torch.compile
    sees operators, also of calls with out or a KVCache; tensors on meta give one there.

    Raises a FlashgenError, before anything is queued or written: BadParam, BadTensorShape, BadTensorDtype,
    BadTensorStrides, NullPointer, DeviceTypeNotSupported, NoCompilerError, or CompileError.
    """
    if unknown:
        raise unexpected(attention, unknown)
    of_score = softcap, alibi_slopes, score, params
    lengths = kv_lengths, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv
    options = causal, mask_type, window_size, return_lse, splits
    if deterministic is not False:
        deterministic = flag("deterministic", deterministic)
    kind = arrays.kind_of(q)
    if kind is None or not kind.records(q, k, v):
        try:
            if append is not None or rotary is not None:
                from flashgen.api.append import append_and_attend, asked_to_append

                of_append = asked_to_append(
                    q, k, append, rotary, cu_seqlens_q, max_seqlen_kv, mask, options[:3], stream
                )

                def attention_over(q: Any, cache: KVCache) -> Asked:
                    return asked(q, cache, v, mask, out, options, softmax_scale, of_score, lengths)

                return append_and_attend(of_append, attention_over, q, k, stream, backend, algorithm)
            wanted = asked(q, k, v, mask, out, options, softmax_scale, of_score, lengths)
            return call_of(kind, *wanted, stream, backend, algorithm)
        except torchkind.RequiresGradient as error:
            # Raised where layouts are read, which looks at each tensor anyway: other calls pay nothing.
            without = _unrecorded(k, out, stream, append, rotary)
            if without:
                refused = error.of(f"calls with {without}")
                rename(refused, **names_given(k, alibi_slopes, kv_lengths, softcap))
                raise refused from None
        except FlashgenError as error:
            rename(error, **names_given(k, alibi_slopes, kv_lengths, softcap))
            raise
    return_lse = flag("return_lse", return_lse)
    writes = _unrecorded(k, out, stream, append, rotary)
    with naming(**names_given(k, alibi_slopes, kv_lengths, softcap)):
        if writes:
            from flashgen.api import compiled

            of_append = None
            if append is not None or rotary is not None:
                from flashgen.api.append import asked_to_append

                of_append = asked_to_append(
                    q, k, append, rotary, cu_seqlens_q, max_seqlen_kv, mask, options[:3]
                )
            results = compiled.attention(
                (q, k, v, mask, out),
                options[:3],
                softmax_scale,
                of_score,
                lengths,
                of_append,
                f"calls with {writes}",
                return_lse=return_lse,
                splits=splits,
                stream=stream,
                backend=backend,
                algorithm=algorithm,
            )
        else:
            from flashgen.api import autograd

            results = autograd.attention(
                (q, k, v, mask),
                options[:3],
                softmax_scale,
                of_score,
                lengths,
                splits=splits,
                deterministic=deterministic,
                backend=backend,
                algorithm=algorithm,
            )
    return results if return_lse else results[0]


def _unrecorded(k: Any, out: Any, stream: Any, append: Any, rotary: Any) -> str:
    """What a call has that autograd's operators have not, empty if nothing."""
    if isinstance(k, KVCache) or append is not None or rotary is not None:
        return "a KVCache"
    return "out" if out is not None else "stream" if stream is not None else ""


@overload
def plan(
    q: Any, k: Any, v: Any = None, *, append: None = None, rotary: None = None, **options: Any
) -> Plan: ...


@overload
def plan(q: Any, k: KVCache, v: None = None, *, append: tuple[Any, Any], **options: Any) -> AppendPlan: ...


def plan(
    q: Any,
    k: Any,
    v: Any = None,
    *,
    causal: bool = False,
    mask: Any = None,
    mask_type: int | str | None = None,
    window_size: tuple[int, int] = NO_WINDOW,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    score: str | Sequence[str] | None = None,
    params: Mapping[str, Any] | None = None,
    kv_lengths: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    splits: Splits = "auto",
    append: tuple[Any, Any] | None = None,
    rotary: Rotary | None = None,
    out: Any = None,
    return_lse: bool = False,
    backend: str | None = None,
    algorithm: str | None = None,
    **unknown: Never,
) -> Plan | AppendPlan:
    """A ``Plan`` for all calls whose arrays have the layouts of these; with ``append`` an ``AppendPlan``.

    Arguments and errors are those of ``attention``. The kernel is compiled and loaded here, so that calls of
    the plan only queue it. The elements of the arrays are not read. An ``out`` here fixes the layout of every
    later ``out``, and one that is not contiguous has to be given to each call; otherwise it is contiguous.
    Parameters of a score modification go to calls of the plan by their names in the spec: ``cap`` of softcap,
    ``slope`` of ALiBi. Arrays are needed for each call, numbers are those given here unless a call has
    others.
    """
    if unknown:
        raise unexpected(plan, unknown)
    of_score = softcap, alibi_slopes, score, params
    lengths = kv_lengths, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv
    options = causal, mask_type, window_size, return_lse, splits
    with naming(**names_given(k, alibi_slopes, kv_lengths, softcap)), planning("plan", q):
        if append is not None or rotary is not None:
            from flashgen.api.append import asked_to_append, held

            of_append = asked_to_append(q, k, append, rotary, cu_seqlens_q, max_seqlen_kv, mask, options[:3])

            def attention_over(q: Any, cache: KVCache) -> Asked:
                return asked(q, cache, v, mask, out, options, softmax_scale, of_score, lengths)

            return held(of_append, attention_over, q, k, rotary, backend, algorithm)
        wanted = asked(q, k, v, mask, out, options, softmax_scale, of_score, lengths)
        return make_plan(*wanted, backend, algorithm)


def asked_by_name(call: Mapping[str, Any]) -> Asked:
    """`asked` of all parameters of ``attention`` by name. Raises BadParam."""
    flag("deterministic", call["deterministic"])
    return asked(
        *(call[name] for name in ("q", "k", "v", "mask", "out")),
        tuple(call[name] for name in ("causal", "mask_type", "window_size", "return_lse", "splits")),
        call["softmax_scale"],
        tuple(call[name] for name in ("softcap", "alibi_slopes", "score", "params")),
        tuple(call[name] for name in LENGTHS),
    )
