"""The front door: ``attention`` and ``plan``."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import numbers
import os
import threading
import time
from collections.abc import Mapping
from functools import lru_cache
from operator import index as index_of
from typing import TYPE_CHECKING, Any, overload

from flashgen import logs
from flashgen.errors import BadParam, DeviceTypeNotSupported, NullPointer
from flashgen.kvcache import KVCache
from flashgen.operators.arguments import dtype_name, flag, on_device, view_of_shape
from flashgen.operators.attention import operator_for, sees_no_later_key
from flashgen.runtime import arrays
from flashgen.runtime.plans import Plan, adopted, run_adopted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from flashgen.appending import AppendPlan
    from flashgen.arch import Device
    from flashgen.kvcache import Rotary
    from flashgen.operators.operator import Operator, Problem
    from flashgen.operators.scores import Score
    from flashgen.operators.splits import Splits
    from flashgen.runtime.plans import Ready, Runner
    from flashgen.schedule.explain import Explanation
    from flashgen.spec.model import Spec

# An operator, and what a call gives it: an array or None for each argument, options, scalars.
Asked = tuple["Operator", tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]
BACKENDS = ("cuda", "cpu", "simulator")
_ON_HOST = ("cpu", "simulator")
# Where the functions are that `explain` and `warmup` know by name. Beside each, `asked_by_name` says what a
# call of it asks for.
_EXPLAINED = {"attention": "flashgen.api", "attention_backward": "flashgen.training"}
# Their parameters that no kernel depends on, or that have arguments of their own.
_UNEXPLAINED = {"append", "rotary", "stream", "backend", "algorithm", "workspace"}
MAX_PLANS = 1024
# What a call says of the lengths of sequences.
LENGTHS = ("kv_lengths", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")
# What is wrong with a call that has bounds alone.
BOUNDS_ALONE = (
    "max_seqlen_q or max_seqlen_kv was given, but no lengths; they are bounds of kv_lengths, cu_seqlens_q "
    "and cu_seqlens_kv"
)

_log = logs.logger("api")
_plans: dict[Any, Plan] = {}
# By all of a call but its arrays: the plan of the last one and, once two of one layout followed each other,
# what gives the pointers of such arrays.
_recent: dict[Any, tuple[Plan, arrays.Expecting | None]] = {}
_plans_lock = threading.Lock()


def attention(
    q: Any,
    k: Any,
    v: Any = None,
    *,
    causal: bool = False,
    mask: Any = None,
    mask_type: int | str | None = None,
    window_size: tuple[int, int] = (-1, -1),
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
) -> Any:
    """softmax(q k^T * softmax_scale, masked) v, exactly, without the matrix of scores.

    Arrays may be of CuPy, NumPy, PyTorch, JAX, or of any library with DLPack or ``__cuda_array_interface__``;
    none is copied. NumPy arrays, and others in host memory, are computed on the CPU.

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
    cu_seqlens_kv: the same for k and v. Not with kv_lengths.
    max_seqlen_q, max_seqlen_kv: bounds of the lengths of sequences, which fix grids; by default what the
        arrays hold. Rows of a sequence past max_seqlen_q may stay unwritten.
    splits: into how many parts the keys of a sequence are split, to be computed side by side and combined.
        "auto": as suits the batch and the GPU, or not at all. An integer n: n parts of equally many KV
        blocks, rounded up, so fewer where there are few; 1: none is split. ``SplitEvery(keys)``: parts of so
        many keys. With both the bits of a sequence do not depend on its batch. n above 1 needs a decoding
        kernel (fp16 and bf16, few rows); SplitEvery splits where there is one.
    append: (k_new, v_new), to be written into the KVCache ahead of the attention, behind the keys that each
        sequence has there: ``flashgen.append``. With cu_seqlens_q they are packed alike. The lengths of the
        cache stay as they are; the caller adds the new tokens to them.
    rotary: a ``Rotary``, with append: rotates the new keys to their positions on the way into the cache, and
        q: query i to the position of new token i where a later key may be hidden (causal or a window), else
        to that of the first one.
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

    Where a tensor of PyTorch, q, k or v, requires a gradient, autograd records the call. It refuses one with
    out, stream or a KVCache, and a mask or an array of a score that requires a gradient itself.

    Raises a FlashgenError, before anything is queued or written: BadParam, BadTensorShape, BadTensorDtype,
    BadTensorStrides, NullPointer, DeviceTypeNotSupported, NoCompilerError, or CompileError.
    """
    of_score = softcap, alibi_slopes, score, params
    lengths = kv_lengths, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv
    options = causal, mask_type, window_size, return_lse, splits
    if deterministic is not False:
        deterministic = flag("deterministic", deterministic)
    kind = arrays.kind_of(q)
    if kind is None or not kind.records(q, k, v) or _unrecorded(v, out, stream, append, rotary):
        try:
            if append is not None or rotary is not None:
                from flashgen.appending import append_and_attend, asked_to_append

                of_append = asked_to_append(q, k, append, rotary, cu_seqlens_q, options[:3], stream)

                def attention_over(q: Any, cache: KVCache) -> Asked:
                    return asked(q, cache, v, mask, out, options, softmax_scale, of_score, lengths)

                return append_and_attend(of_append, attention_over, q, k, stream, backend, algorithm)
            wanted = asked(q, k, v, mask, out, options, softmax_scale, of_score, lengths)
            return _call(kind, *wanted, stream, backend, algorithm)
        except arrays.RequiresGradient as error:
            # Raised where layouts are read, which looks at each tensor anyway: other calls pay nothing.
            without = _unrecorded(v, out, stream, append, rotary)
            if without:
                raise BadParam(f"{error}. There are no gradients of calls with {without}") from None
    from flashgen import autograd

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
    return results if flag("return_lse", return_lse) else results[0]


def _unrecorded(v: Any, out: Any, stream: Any, append: Any, rotary: Any) -> str:
    """What a call has that autograd's operators have not, empty if nothing."""
    if v is None or append is not None or rotary is not None:
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
    window_size: tuple[int, int] = (-1, -1),
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
) -> Plan | AppendPlan:
    """A ``Plan`` for all calls whose arrays have the layouts of these; with ``append`` an ``AppendPlan``.

    Arguments and errors are those of ``attention``. The kernel is compiled and loaded here, so that calls of
    the plan only queue it. The elements of the arrays are not read. An ``out`` here fixes the layout of every
    later ``out``; otherwise it is contiguous. Parameters of a score modification go to calls of the plan by
    their names in the spec: ``cap`` of softcap, ``slope`` of ALiBi. Arrays are needed for each call, numbers
    are those given here unless a call has others.
    """
    of_score = softcap, alibi_slopes, score, params
    lengths = kv_lengths, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv
    options = causal, mask_type, window_size, return_lse, splits
    if append is not None or rotary is not None:
        from flashgen.appending import asked_to_append, held

        of_append = asked_to_append(q, k, append, rotary, cu_seqlens_q, options[:3])

        def attention_over(q: Any, cache: KVCache) -> Asked:
            return asked(q, cache, v, mask, out, options, softmax_scale, of_score, lengths)

        return held(of_append, attention_over, q, k, rotary, backend, algorithm)
    wanted = asked(q, k, v, mask, out, options, softmax_scale, of_score, lengths)
    return make_plan(*wanted, backend, algorithm)


def asked(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    out: Any,
    options: tuple[Any, ...],
    softmax_scale: float | None,
    of_score: tuple[Any, ...],
    lengths: tuple[Any, ...],
) -> Asked:
    """The operator that a call asks for, with its arrays, options and scalars. Raises BadParam."""
    modification, arrays_of_score, scalars = None, (), (softmax_scale,)
    softcap, alibi_slopes, score, params = of_score
    if softcap is not None or alibi_slopes is not None or score is not None or params is not None:
        modification, arrays_of_score, of_score = score_of(
            softcap, alibi_slopes, score, params, sees_no_later_key(*options[:3])
        )
        scalars = (softmax_scale, *of_score)
    kv_lengths, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv = lengths
    index = pages = None
    if v is not None and type(k) is KVCache:
        raise BadParam("v was given with a KVCache, which holds v as well; leave v out")
    if v is None and type(k) is KVCache:
        if kv_lengths is not None or cu_seqlens_kv is not None:
            raise BadParam(
                "kv_lengths or cu_seqlens_kv was given with a KVCache, which has lengths of its own"
            )
        k, v, kv_lengths, pages, index = k.k, k.v, k.lengths, k.pages, k.index
        if kv_lengths is None:
            raise NullPointer("lengths of the KVCache is None; expected an int32 array, (batch,)")
    elif kv_lengths is None and cu_seqlens_q is None and cu_seqlens_kv is None:
        if max_seqlen_q is not None or max_seqlen_kv is not None:
            raise BadParam(BOUNDS_ALONE)
        given = (q, k, v, mask, out, None, *arrays_of_score)
        return operator_for(modification), given, (*options, modification), scalars
    arrays_of_lengths = cu_seqlens_q, cu_seqlens_kv, kv_lengths, index, pages
    given = (q, k, v, *arrays_of_lengths, mask, out, None, *arrays_of_score)
    options = (*options, bound(max_seqlen_q), bound(max_seqlen_kv), modification)
    from flashgen.operators.varlen import operator_for as varlen_for  # other first calls need not wait for it

    return varlen_for(modification), given, options, scalars


@lru_cache(maxsize=len(_EXPLAINED))
def _function(name: str) -> tuple[Mapping[str, Any], Callable[[Mapping[str, Any]], Asked]]:
    """The parameters of a function in `_EXPLAINED` with their defaults, None where there is none, and its
    `asked_by_name`.
    """
    module = importlib.import_module(_EXPLAINED[name])
    parameters = inspect.signature(getattr(module, name)).parameters.values()
    named = (each for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD)
    defaults = {each.name: None if each.default is each.empty else each.default for each in named}
    return defaults, module.asked_by_name


def asked_by_name(call: Mapping[str, Any]) -> Asked:
    """`asked` of all parameters of ``attention`` by name."""
    return asked(
        *(call[name] for name in ("q", "k", "v", "mask", "out")),
        tuple(call[name] for name in ("causal", "mask_type", "window_size", "return_lse", "splits")),
        call["softmax_scale"],
        tuple(call[name] for name in ("softcap", "alibi_slopes", "score", "params")),
        tuple(call[name] for name in LENGTHS),
    )


def bound(max_seqlen: Any) -> Any:
    """An int for what stands for one: the element of a tensor may change, and its plan would not."""
    try:
        return index_of(max_seqlen)
    except TypeError:
        return max_seqlen  # None, or what the operator refuses


def score_of(
    softcap: float | None,
    alibi_slopes: Any,
    score: str | Sequence[str] | None,
    params: Mapping[str, Any] | None,
    sees_no_later_key: bool,
) -> tuple[Score, tuple[Any, ...], tuple[Any, ...]]:
    """The score modification that a call asks for, its arrays and its numbers. Raises BadParam."""
    names, given = named_score(softcap, alibi_slopes, score, params, sees_no_later_key)
    modification = _chain(os.environ.get("FLASHGEN_SPECS", ""), names)
    wanted = {param.name for param in modification.params}
    for name in sorted(given.keys() ^ wanted):
        has = f"it has {', '.join(sorted(wanted)) or 'none'}"
        if name in given:
            raise BadParam(f"score {modification.name} has no parameter {name}; {has}")
        raise BadParam(
            f"score {modification.name} needs the parameter {name}; pass params={{{name!r}: ...}}: {has}"
        )
    return (
        modification,
        tuple(given[param.name] for param in modification.arrays),
        tuple(given[param.name] for param in modification.scalars),
    )


def named_score(
    softcap: float | None,
    alibi_slopes: Any,
    score: str | Sequence[str] | None,
    params: Mapping[str, Any] | None,
    sees_no_later_key: bool,
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The names of the score modifications that a call asks for, and their parameters. Raises BadParam."""
    names = [score] if isinstance(score, str) else score
    if names is not None and not (isinstance(names, (list, tuple)) and names):
        raise BadParam(f"score is {score!r}; it must be the name of a score modification, or several")
    if params is not None and not isinstance(params, Mapping):
        raise BadParam(f"params is {params!r}; it must map the names of parameters to numbers and arrays")
    names, given = list(names or ()), dict(params or {})
    if names and (softcap is not None or alibi_slopes is not None):
        raise BadParam(
            f"score is {score!r} and softcap or alibi_slopes was given as well; name all in score, such as "
            "('softcap', 'mine'), and give their params"
        )
    if not names:
        if given:
            raise BadParam(f"params has {', '.join(given)}, but no score was given")
        if softcap is not None:
            if not isinstance(softcap, numbers.Real) or not 0 < softcap < math.inf:
                raise BadParam(f"softcap is {softcap!r}; it must be a number above 0, or None for no cap")
            names, given = ["softcap"], {"cap": softcap}
        if alibi_slopes is not None:
            # Where no later key is seen the bias is linear, which costs less.
            names = [*names, "alibi" if sees_no_later_key else "alibi_symmetric"]
            given |= {"slope": alibi_slopes}
    return tuple(names), given


def explain(
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    dtype: str = "fp16",
    arch: str | None = None,
    operator: str = "attention",
    **options: Any,
) -> Explanation:
    """Which kernel a call of ``attention`` or ``attention_backward`` takes, and why not the others. Needs no
    GPU and compiles nothing.

    q, k, v: shapes, as in ``attention``, or arrays. k is by default as q, and v as k.
    dtype: that of q, k and v where these are shapes: "fp16", "bf16" or "fp32", or its usual name ("float16").
    arch: the architecture to explain for, such as "sm_90"; None: that of this machine's GPU. For another one
        a well-known GPU is assumed: an H100 for sm_90.
    operator: the function that is called: "attention" or "attention_backward".
    options: any other argument of it; arrays, such as mask, may be shapes as well. Inputs that there must be,
        such as dout, have by default the shapes that belong to q, k and v.

    ``explain(...).variant`` is the kernel, ``steps`` and ``workspace_bytes`` are those of a plan; printed,
    the result says why. Raises BadParam for an unknown option, operator or architecture, and what the call
    raises for wrong shapes and options.
    """
    from flashgen.schedule.explain import explain as explained

    device = _device_of(arch)
    algorithm = options.pop("algorithm", None)
    problem = _shaped(operator, {"q": q, "k": k, "v": v} | options, dtype)
    return explained(problem, device, specs_for(device, problem.operator.name), algorithm)


def warmup(
    calls: Iterable[Mapping[str, Any]], *, arch: str | None = None, jobs: int | None = None
) -> tuple[str, ...]:
    """Compile, and on this machine's GPU load, the kernels of calls to come, in parallel; without arrays.

    calls: for each call the arguments of ``explain`` by name: ``{"q": (1, 4096, 16, 128), "causal": True}``;
        ``dtype`` is "fp16" and ``operator`` "attention" where it is not given.
    arch: the architecture to compile for, such as "sm_90", on a machine with or without it; nothing is loaded
        then. None: GPU 0 of this machine.
    jobs: how many kernels to compile at once; by default one for each processor.

    Returns the name of the kernel that each call takes. Afterwards the first call of such a shape only makes
    its plan. Raises what such calls raise: BadParam, BadTensorShape, CompileError, ...
    """
    from flashgen.schedule.dispatch import offers, select
    from flashgen.toolchain.compile import in_parallel

    device = _device_of(arch)
    specs = specs_for(device)
    shaped = []
    for call in calls:
        given = dict(call)
        dtype = given.pop("dtype", "fp16")
        if "q" not in given:
            raise BadParam(f"a call of warmup has no q: {call}; it is a shape, such as (1, 4096, 16, 128)")
        operator, algorithm = given.pop("operator", "attention"), given.pop("algorithm", None)
        shaped.append((_shaped(operator, given, dtype), algorithm))
    if arch is None:
        from flashgen.runtime.launch import prepare

        def ready(call: tuple[Problem, str | None]) -> str:
            problem, algorithm = call
            offered = offers(problem, device, specs, algorithm)
            return prepare(problem, device.ordinal, offered).variant.name
    else:
        from flashgen.toolchain.obtain import arch_for, obtain, own_arch, recall

        def ready(call: tuple[Problem, str | None]) -> str:
            problem, algorithm = call
            main = select(problem, device, offers(problem, device, specs, algorithm))
            for variant in main.steps:
                if recall(variant, own_arch(variant, device)) is None:
                    obtain(variant, arch_for(variant, device))
            return main.name

    return tuple(in_parallel(ready, shaped, jobs))


def _device_of(arch: str | None) -> Device:
    """This machine's GPU, or a typical one of an architecture that it does not have."""
    from flashgen.arch import typical
    from flashgen.runtime import device as devices

    if arch is None or (devices.available() and devices.device(0).arch == arch):
        if not devices.available():
            raise DeviceTypeNotSupported(
                f"{devices.why_unavailable()}; say for which GPU: arch='sm_90' (--arch sm_90)"
            )
        return devices.device(0)
    return typical(arch)


def specs_for(device: Device, operator: str | None = None) -> tuple[Spec, ...]:
    """The specs that calls on a device choose among, with what is tuned for it: all, or those of an operator,
    which the first call of a process need not wait for others to see. Folders of the caller are read whole.
    """
    folders, tuned = os.environ.get("FLASHGEN_SPECS", ""), os.environ.get("FLASHGEN_TUNED", "")
    return _specs(folders, tuned, device.name, None if folders else operator)


def _shaped(function: str, given: dict[str, Any], dtype: str) -> Problem:
    """The Problem of a call on GPU 0, from its keywords; an array may be a shape. k is by default as q, v as
    k, and any other input that there must be has the shape that belongs to these.
    """
    dtype = dtype_name(dtype)
    if function not in _EXPLAINED:
        raise BadParam(f"operator is {function!r}; allowed are {', '.join(map(repr, _EXPLAINED))}")
    defaults, asked_by_name = _function(function)
    known = defaults.keys() - _UNEXPLAINED
    unknown = given.keys() - known
    if unknown:
        raise BadParam(f"{', '.join(sorted(unknown))}: no such option; there are {', '.join(sorted(known))}")
    call = defaults | given
    if call["k"] is None:
        call["k"] = call["q"]
    if call["v"] is None and type(call["k"]) is not KVCache:
        call["v"] = call["k"]
    operator, given_arrays, options, scalars = asked_by_name(call)
    shapes = {
        argument.name: shape
        for argument, x in zip(operator.arguments, given_arrays, strict=True)
        if isinstance(shape := getattr(x, "shape", x), tuple | list) and not argument.optional
    }
    views = []
    for argument, x in zip(operator.arguments, given_arrays, strict=True):
        if x is None and not (argument.optional or argument.is_output):
            x = operator.shape_beside(argument.name, shapes)
        if x is None:
            views.append(None)
        elif isinstance(x, tuple | list) and all(isinstance(extent, int) for extent in x):
            views.append(view_of_shape(x, argument.dtype(dtype), 0))
        else:
            view = arrays.view(arrays.adopt(x, argument.name), argument.name)
            views.append(dataclasses.replace(view, device=0))
    return operator.normalise(views, options, scalars)


def call(
    operator: Operator,
    given: tuple[Any, ...],
    options: tuple[Any, ...] = (),
    scalars: tuple[Any, ...] = (),
    *,
    stream: Any,
    backend: str | None,
    algorithm: str | None = None,
    workspace: Any = None,
) -> Any:
    """Compute ``given``, an array or None for each argument of an operator."""
    kind = arrays.kind_of(given[0])
    return _call(kind, operator, given, options, scalars, stream, backend, algorithm, workspace)


def _call(
    kind: arrays.Kind | None,
    operator: Operator,
    given: tuple[Any, ...],
    options: tuple[Any, ...],
    scalars: tuple[Any, ...],
    stream: Any,
    backend: str | None,
    algorithm: str | None,
    workspace: Any = None,
) -> Any:
    """Compute ``given``, an array or None for each argument of the operator, with a plan that is kept.
    ``kind`` is that of the first.
    """
    # Most arrays are of these types: no need to ask for the kind of each.
    if kind is None or not (kind.types.issuperset(map(type, given)) or _are_all(kind, given)):
        return _call_adopted(operator, given, options, scalars, stream, backend, algorithm, workspace)
    known, pointers = _known(kind, operator, given, options, scalars, backend, algorithm)
    return known.run(given, pointers, scalars, stream, workspace)


def _are_all(kind: arrays.Kind | None, given: tuple[Any, ...]) -> bool:
    """Whether all arrays are of one native library, that of the first."""
    return kind is not None and all(x is None or arrays.kind_of(x) is kind for x in given)


def _known(
    kind: arrays.Kind,
    operator: Operator,
    given: tuple[Any, ...],
    options: tuple[Any, ...],
    scalars: tuple[Any, ...],
    backend: str | None,
    algorithm: str | None,
) -> tuple[Plan, tuple[int, ...]]:
    """The kept plan of a call, made if it is the first, and the pointers of its arrays, of one library."""
    if not backend and kind.on_host(given[0]):
        # On a GPU there is one backend, and only a new plan asks whether it is forbidden: a look takes 1 µs.
        backend = os.environ.get("FLASHGEN_BACKEND")
    wanted = operator.name, options, backend, algorithm
    expecting, recent = kind.expecting, None
    if expecting is not None:
        recent, expected = _recent_of(wanted)
        if expected is not None:
            pointers = expected(given)
            if pointers is not None:
                return recent, pointers
    try:
        layouts, pointers = kind.read(given)
    except RuntimeError:
        make_plan(operator, given, options, scalars, backend, algorithm)  # raises what is wrong, by name
        raise
    key = wanted, layouts
    try:
        known = _plans.get(key)
    except TypeError:  # an option is not hashable, such as a window in a list
        return make_plan(operator, given, options, scalars, backend, algorithm, keeps_scalars=False), pointers
    if known is None:
        known = make_plan(operator, given, options, scalars, backend, algorithm, keeps_scalars=False)
        _remember(key, known)
    if expecting is not None:
        expected = expecting(given) if known is recent else None
        with _plans_lock:
            _recent[wanted] = known, expected
    return known, pointers


def _recent_of(wanted: tuple[Any, ...]) -> tuple[Plan | None, arrays.Expecting | None]:
    try:
        return _recent.get(wanted, (None, None))
    except TypeError:  # as in `_known`
        return None, None


def ready(
    operator: Operator,
    given: tuple[Any, ...],
    options: tuple[Any, ...],
    scalars: tuple[Any, ...],
    stream: Any,
    backend: str | None,
    algorithm: str | None,
) -> tuple[Plan, Ready]:
    """The kept plan of a call, and the call itself: checked, with memory for its results, not yet queued."""
    kind = arrays.kind_of(given[0])
    if not _are_all(kind, given):
        named = {argument.name: x for argument, x in zip(operator.arguments, given, strict=True)}
        given = tuple(adopted(operator, named, stream).values())
        kind = arrays.kind_of(given[0])
    if not _are_all(kind, given):
        make_plan(operator, given, options, scalars, backend, algorithm)  # raises: the kinds differ
    known, pointers = _known(kind, operator, given, options, scalars, backend, algorithm)
    return known, known.ready(given, pointers, scalars, stream)


def make_plan(
    operator: Operator,
    given: tuple[Any, ...],
    options: tuple[Any, ...],
    scalars: tuple[Any, ...],
    backend: str | None,
    algorithm: str | None,
    keeps_scalars: bool = True,
) -> Plan:
    """A plan whose scalars are these, or, where it does not keep them, those that a call leaves out."""
    native = tuple(
        None if x is None and (argument.optional or argument.is_output) else arrays.adopt(x, argument.name)
        for argument, x in zip(operator.arguments, given, strict=True)
    )
    views = tuple(
        None if x is None else arrays.view(x, argument.name)
        for argument, x in zip(operator.arguments, native, strict=True)
    )
    for view, argument in zip(views[1:], operator.arguments[1:], strict=True):
        # Each library has its own current stream, so work on arrays of two of them would be in no order.
        if view is not None and view.kind != views[0].kind and view.device == views[0].device:
            raise BadParam(
                f"{argument.name} is a {view.kind} array but {operator.arguments[0].name} is a "
                f"{views[0].kind} one; convert it; DLPack does so without a copy"
            )
    problem = operator.normalise(views, options, (None,) * len(scalars))
    called = problem.with_scalars(scalars)  # raises what is wrong with them, ahead of compiling
    begin = time.perf_counter()
    made = Plan(called if keeps_scalars else problem, _runner(problem, backend, algorithm), native)
    _log.info(
        "%s of %s takes %s, ready in %.1f ms",
        operator.name,
        ", ".join(f"{name} {size}" for name, size in problem.sizes.items()) + f", {problem.dtype}",
        made.variant or "the CPU path",
        1e3 * (time.perf_counter() - begin),
    )
    return made


def _call_adopted(
    operator: Operator,
    given: tuple[Any, ...],
    options: tuple[Any, ...],
    scalars: tuple[Any, ...],
    stream: Any,
    backend: str | None,
    algorithm: str | None,
    workspace: Any = None,
) -> Any:
    """`_call` where not all arrays are of one native library."""
    if all(x is None or arrays.kind_of(x) is not None for x in given):
        make_plan(operator, given, options, scalars, backend, algorithm)  # raises: the kinds differ
    names = [argument.name for argument in operator.arguments]

    def call(*, stream: Any, **native: Any) -> Any:
        arrays_of = tuple(native[name] for name in names)
        kind = arrays.kind_of(arrays_of[0])
        return _call(kind, operator, arrays_of, options, scalars, stream, backend, algorithm, workspace)

    return run_adopted(call, operator, dict(zip(names, given, strict=True)), stream)


def backend_for(device: int | None, backend: str | None = None) -> str:
    """The backend that computes arrays on ``device``, a CUDA ordinal or None for host memory.

    This is the one place that picks it: ``backend``, else FLASHGEN_BACKEND, else what the device asks for.
    Raises BadParam for an unknown name, DeviceTypeNotSupported for a backend that cannot reach the arrays:
    nothing is copied unasked.
    """
    wanted = backend or os.environ.get("FLASHGEN_BACKEND") or None
    natural = "cpu" if device is None else "cuda"
    if wanted is None:
        return natural
    if wanted not in BACKENDS:
        raise BadParam(f"backend is {wanted!r}; allowed are {', '.join(map(repr, BACKENDS))}")
    if wanted != natural and not (device is None and wanted in _ON_HOST):
        place = on_device(device)
        raise DeviceTypeNotSupported(f"backend {wanted!r} cannot compute arrays {place}; copy them first")
    return wanted


def _runner(problem: Problem, backend: str | None, algorithm: str | None) -> Runner:
    chosen = backend_for(problem.device, backend)
    folders = os.environ.get("FLASHGEN_SPECS", "")
    if chosen == "cpu":
        from flashgen.cpu import runner_of

        if algorithm is not None:
            from flashgen.schedule.dispatch import named

            named(problem, _specs(folders), algorithm)  # raises for a name that there is not
        return runner_of(problem.operator.name)
    if chosen == "simulator":
        from flashgen.simulator.backend import prepare as simulated

        return simulated(problem, _specs(folders), algorithm)
    from flashgen.runtime.device import device
    from flashgen.runtime.launch import prepare
    from flashgen.schedule.dispatch import offers

    here = device(problem.device)
    specs = specs_for(here, problem.operator.name)
    return prepare(problem, problem.device, offers(problem, here, specs, algorithm))


@lru_cache(maxsize=64)
def _chain(folders: str, names: tuple[str, ...]) -> Score:
    """The modifications of these names, one after another, as the value ``folders`` of FLASHGEN_SPECS has
    them.
    """
    from flashgen.operators.scores import chained
    from flashgen.spec.scores import load_scores

    known = load_scores().by_name
    for name in names:
        if name not in known:
            raise BadParam(f"score is {name!r}; there are {', '.join(map(repr, sorted(known)))}")
    return chained([known[name] for name in names])


@lru_cache(maxsize=32)
def _specs(
    folders: str, tuned: str = "", gpu: str | None = None, operator: str | None = None
) -> tuple[Spec, ...]:
    """The shipped specs and those in ``folders``, with what is tuned for ``gpu``; ``folders`` and ``tuned``
    are the values of FLASHGEN_SPECS and FLASHGEN_TUNED. Read once for each set of these."""
    from flashgen.spec.load import load_specs
    from flashgen.toolchain import cache as caches

    specs = load_specs(cache=caches.default(), gpu=gpu, operator=operator)
    if folders:
        from flashgen.source.render import warn_of_unused_overrides

        warn_of_unused_overrides(specs)
    return specs


def _remember(key: Any, known: Plan) -> None:
    with _plans_lock:
        for kept in (_plans, _recent):
            while len(kept) >= MAX_PLANS:
                del kept[next(iter(kept))]
        _plans[key] = known
