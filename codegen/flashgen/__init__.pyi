# Written by `python -m flashgen.api.stub` from the fields of a call; not to be edited.

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict, overload

from flashgen import distributed as distributed
from flashgen.api.append_and_attend import AppendPlan as AppendPlan
from flashgen.api.weights import WeightsPlan as WeightsPlan
from flashgen.call.blockmask import BlockMask as BlockMask
from flashgen.call.kvcache import KVCache as KVCache
from flashgen.call.kvcache import Rotary as Rotary
from flashgen.call.mask import Mask as Mask
from flashgen.call.recorded import record as record
from flashgen.errors import BadParam as BadParam
from flashgen.errors import BadTensorDtype as BadTensorDtype
from flashgen.errors import BadTensorShape as BadTensorShape
from flashgen.errors import BadTensorStrides as BadTensorStrides
from flashgen.errors import CacheWarning as CacheWarning
from flashgen.errors import CompileError as CompileError
from flashgen.errors import CompileWarning as CompileWarning
from flashgen.errors import DeviceTypeNotSupported as DeviceTypeNotSupported
from flashgen.errors import FlashgenError as FlashgenError
from flashgen.errors import GatherWarning as GatherWarning
from flashgen.errors import InsufficientWorkspace as InsufficientWorkspace
from flashgen.errors import InternalError as InternalError
from flashgen.errors import NoBindingError as NoBindingError
from flashgen.errors import NoCompilerError as NoCompilerError
from flashgen.errors import NoHostCompilerError as NoHostCompilerError
from flashgen.errors import NullPointer as NullPointer
from flashgen.errors import SimulationError as SimulationError
from flashgen.errors import SpecError as SpecError
from flashgen.errors import TemplateWarning as TemplateWarning
from flashgen.errors import TunedWarning as TunedWarning
from flashgen.errors import UnexpectedCompile as UnexpectedCompile
from flashgen.operators.splits import SplitEvery as SplitEvery
from flashgen.runtime.plans import Plan as Plan
from flashgen.schedule.explain import Explanation
from flashgen.toolchain.policy import compiling as compiling

__version__: str
__all__ = [
    "AppendPlan",
    "BadParam",
    "BadTensorDtype",
    "BadTensorShape",
    "BadTensorStrides",
    "BlockMask",
    "CacheWarning",
    "CompileError",
    "CompileWarning",
    "DeviceTypeNotSupported",
    "FlashgenError",
    "GatherWarning",
    "InsufficientWorkspace",
    "InternalError",
    "KVCache",
    "Mask",
    "NoBindingError",
    "NoCompilerError",
    "NoHostCompilerError",
    "NullPointer",
    "Plan",
    "Rotary",
    "SimulationError",
    "SpecError",
    "SplitEvery",
    "TemplateWarning",
    "TunedWarning",
    "UnexpectedCompile",
    "WeightsPlan",
    "append",
    "attention",
    "attention_backward",
    "cascade",
    "compiling",
    "distributed",
    "explain",
    "merge",
    "plan",
    "plan_backward",
    "quantize",
    "record",
    "warmup",
]

class _AttentionPlan(Plan):
    def __call__(
        self,
        /,
        *inputs: Any,
        q: Any = ...,
        k: Any = ...,
        v: Any = ...,
        mask: Any = ...,
        out: Any = ...,
        lse: Any = ...,
        sinks: Any = ...,
        block_indptr: Any = ...,
        block_indices: Any = ...,
        dropout_seed: Any = ...,
        cu_seqlens_q: Any = ...,
        cu_seqlens_kv: Any = ...,
        kv_lengths: Any = ...,
        index: Any = ...,
        pages: Any = ...,
        kv_starts: Any = ...,
        k_scale: Any = ...,
        v_scale: Any = ...,
        tree: Any = ...,
        softmax_scale: float | None = ...,
        stream: Any = ...,
        workspace: Any = ...,
        **params: Any,
    ) -> Any: ...

class _GradientPlan(Plan):
    def __call__(
        self,
        /,
        *inputs: Any,
        dout: Any = ...,
        q: Any = ...,
        k: Any = ...,
        v: Any = ...,
        mask: Any = ...,
        out: Any = ...,
        lse: Any = ...,
        sinks: Any = ...,
        block_indptr: Any = ...,
        block_indices: Any = ...,
        dropout_seed: Any = ...,
        dlse: Any = ...,
        dq: Any = ...,
        dk: Any = ...,
        dv: Any = ...,
        dsinks: Any = ...,
        cu_seqlens_q: Any = ...,
        cu_seqlens_kv: Any = ...,
        kv_lengths: Any = ...,
        kv_starts: Any = ...,
        softmax_scale: float | None = ...,
        stream: Any = ...,
        workspace: Any = ...,
        **params: Any,
    ) -> Any: ...

class _WarmupCall(TypedDict, total=False):
    q: Any
    k: Any
    v: Any
    dtype: str
    operator: str
    causal: bool
    mask: Any
    mask_type: int | str | None
    window_size: tuple[int, int]
    softmax_scale: float | None
    softcap: float | None
    alibi_slopes: Any
    score: str | Sequence[str] | None
    params: Mapping[str, Any] | None
    sinks: Any
    dropout_p: float
    dropout_seed: Any
    q_scale: Any
    k_scale: Any
    v_scale: Any
    out_dtype: str | None
    out_scale: Any
    accumulate: str | None
    kv_lengths: Any
    kv_starts: Any
    cu_seqlens_q: Any
    cu_seqlens_kv: Any
    tree: Any
    indices: Any
    q_rope: Any
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    splits: str | int | SplitEvery
    sm_margin: int
    rotary: Rotary | None
    out: Any
    return_lse: bool
    deterministic: bool
    algorithm: str | None
    dout: Any
    lse: Any
    dlse: Any
    dq: Any
    dk: Any
    dv: Any
    dsinks: Any
    dparams: Sequence[str] | None
    cache: Any
    k_new: Any
    v_new: Any
    q_positions: str
    cu_seqlens_new: Any

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
    sinks: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    dtype: str | None = None,
    out_dtype: str | None = None,
    out_scale: Any = None,
    accumulate: str | None = None,
    kv_lengths: Any = None,
    kv_starts: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    tree: Any = None,
    indices: Any = None,
    q_rope: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    splits: str | int | SplitEvery = "auto",
    sm_margin: int = 0,
    append: tuple[Any, Any] | None = None,
    rotary: Rotary | None = None,
    out: Any = None,
    return_lse: bool = False,
    return_weights: bool = False,
    deterministic: bool = False,
    stream: Any = None,
    backend: str | None = None,
    algorithm: str | None = None,
) -> Any: ...
@overload
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
    sinks: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    dtype: str | None = None,
    out_dtype: str | None = None,
    out_scale: Any = None,
    accumulate: str | None = None,
    kv_lengths: Any = None,
    kv_starts: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    tree: Any = None,
    indices: Any = None,
    q_rope: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    splits: str | int | SplitEvery = "auto",
    sm_margin: int = 0,
    append: None = None,
    rotary: None = None,
    out: Any = None,
    return_lse: bool = False,
    return_weights: Literal[False] = False,
    backend: str | None = None,
    algorithm: str | None = None,
) -> _AttentionPlan: ...
@overload
def plan(
    q: Any,
    k: KVCache,
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
    sinks: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    dtype: str | None = None,
    out_dtype: str | None = None,
    out_scale: Any = None,
    accumulate: str | None = None,
    kv_lengths: Any = None,
    kv_starts: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    tree: Any = None,
    indices: Any = None,
    q_rope: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    splits: str | int | SplitEvery = "auto",
    sm_margin: int = 0,
    append: tuple[Any, Any],
    rotary: Rotary | None = None,
    out: Any = None,
    return_lse: bool = False,
    return_weights: Literal[False] = False,
    backend: str | None = None,
    algorithm: str | None = None,
) -> AppendPlan: ...
@overload
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
    sinks: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    dtype: str | None = None,
    out_dtype: str | None = None,
    out_scale: Any = None,
    accumulate: str | None = None,
    kv_lengths: Any = None,
    kv_starts: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    tree: Any = None,
    indices: Any = None,
    q_rope: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    splits: str | int | SplitEvery = "auto",
    sm_margin: int = 0,
    append: None = None,
    rotary: None = None,
    out: Any = None,
    return_lse: bool = False,
    return_weights: Literal[True],
    backend: str | None = None,
    algorithm: str | None = None,
) -> WeightsPlan: ...
def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
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
    sinks: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    out_scale: Any = None,
    kv_lengths: Any = None,
    kv_starts: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    tree: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    dlse: Any = None,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dsinks: Any = None,
    deterministic: bool = False,
    dparams: Sequence[str] | None = None,
    workspace: Any = None,
    stream: Any = None,
    backend: str | None = None,
) -> tuple[Any, ...]: ...
def plan_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
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
    sinks: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    out_scale: Any = None,
    kv_lengths: Any = None,
    kv_starts: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    tree: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    dlse: Any = None,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dsinks: Any = None,
    deterministic: bool = False,
    backend: str | None = None,
) -> _GradientPlan: ...
def append(
    cache: KVCache,
    k_new: Any,
    v_new: Any = None,
    *,
    q: Any = None,
    rotary: Rotary | None = None,
    q_positions: str = "each",
    cu_seqlens_new: Any = None,
    stream: Any = None,
    backend: str | None = None,
) -> tuple[Any, Any]: ...
def cascade(
    q: Any,
    parts: Sequence[tuple[Any, Any] | KVCache],
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    out: Any = None,
    return_lse: bool = False,
    stream: Any = None,
    backend: str | None = None,
) -> Any: ...
def merge(
    parts: Sequence[tuple[Any, Any]],
    *,
    out: Any = None,
    lse_out: Any = None,
    stream: Any = None,
    backend: str | None = None,
) -> tuple[Any, Any]: ...
def quantize(
    x: Any,
    per: str = "tensor",
    *,
    scale: Any = None,
    out: Any = None,
    stream: Any = None,
    backend: str | None = None,
) -> tuple[Any, Any]: ...
def explain(
    q: Any = None,
    k: Any = None,
    v: Any = None,
    *,
    dtype: str = "fp16",
    arch: str | None = None,
    operator: str = "attention",
    causal: bool = False,
    mask: Any = None,
    mask_type: int | str | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    score: str | Sequence[str] | None = None,
    params: Mapping[str, Any] | None = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    out_dtype: str | None = None,
    out_scale: Any = None,
    accumulate: str | None = None,
    kv_lengths: Any = None,
    kv_starts: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    tree: Any = None,
    indices: Any = None,
    q_rope: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    splits: str | int | SplitEvery = "auto",
    sm_margin: int = 0,
    rotary: Rotary | None = None,
    out: Any = None,
    return_lse: bool = False,
    deterministic: bool = False,
    algorithm: str | None = None,
    dout: Any = None,
    lse: Any = None,
    dlse: Any = None,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dsinks: Any = None,
    dparams: Sequence[str] | None = None,
    cache: Any = None,
    k_new: Any = None,
    v_new: Any = None,
    q_positions: str = "each",
    cu_seqlens_new: Any = None,
) -> Explanation: ...
def warmup(
    calls: Iterable[_WarmupCall] | str | PathLike[str],
    *,
    arch: str | None = None,
    jobs: int | None = None,
) -> tuple[str, ...]: ...
