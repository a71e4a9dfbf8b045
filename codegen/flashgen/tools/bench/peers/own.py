"""flashgen itself, through a held plan: as dispatched, with the grouping of query heads, the target or the
variant pinned, by one algorithm, or without lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flashgen.tools.bench.cases import SOFTCAP
from flashgen.tools.bench.hosts import Inputs, shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from flashgen.families.variant import Variant
    from flashgen.runtime.plans import Plan
    from flashgen.tools.bench.cases import Case
    from flashgen.tools.bench.peers.base import Run


class _Own:
    """What the peers have in common. ``variant`` is the name of the variant of the last case."""

    hosts = ("cupy", "torch")
    variant: str | None = None

    def unavailable(self) -> str | None:
        from flashgen.runtime import device

        return None if device.available() else device.why_unavailable()


class Flashgen(_Own):
    """``flashgen.plan``, or ``flashgen.plan_backward``; with ``grouping`` (``gqa`` or ``packed``) only
    variants of that grouping compete, with ``target`` only variants of that target, with ``pinned`` only the
    variant of that name, with ``algorithm`` only its variants, whose workspace is then held too:
    ``workspace_bytes`` of it. With ``steps`` a call launches only the first ones, and its results are no
    results. ``plan`` is the plan of the last case.
    """

    def __init__(
        self,
        grouping: str | None = None,
        algorithm: str | None = None,
        target: str | None = None,
        steps: int | None = None,
        pinned: str | None = None,
    ) -> None:
        self.name = "-".join(part for part in ("flashgen", grouping, algorithm, target) if part)
        self.plan: Plan | None = None
        self.algorithm = algorithm
        self.workspace_bytes = 0
        self._grouping, self._target, self._steps, self._pinned = grouping, target, steps, pinned

    def declines(self, case: Case) -> str | None:
        if self._target is not None and not (case.is_backward or case.dropout_p or case.line):
            return "timed on gradients, with dropout, and on masks by a line, whose families it tells apart"
        if (self._grouping or self.algorithm) and case.is_backward:
            return "gradients have one grouping and no algorithms"
        if self._grouping is not None and case.group_size == 1:
            return "one query head per kv head"
        if (self._grouping or self.algorithm) and case.lengths != "none":
            return "arrays without lengths only"
        if self.algorithm == "v3" and case.dtype == "fp32":
            return "fp16 and bf16 only"
        if self.algorithm in ("naive", "v1") and not (
            case.dtype != "fp32"
            and case.group_size == 1
            and case.mask in ("none", "causal")
            and max(case.head_dim, case.width_v) <= 128
            and not case.dropout_p
        ):
            return (
                "fp16 and bf16, head_dim up to 128, full and causal, one query head per kv head, no dropout "
                "only"
            )
        return None

    def prepare(self, case: Case, sets: Sequence[Inputs]) -> Run:
        from flashgen import plan as make_plan

        first = sets[0]
        if case.is_backward:
            return self._gradients(case, sets)
        if case.lengths != "none":
            return self._with_lengths(case, sets)
        operands = first.q, first.k, first.v
        plan = make_plan(*operands, out=first.out, algorithm=self.algorithm, **_options(case, first))
        examples = {"q": first.q, "k": first.k, "v": first.v, "out": first.out, "sinks": first.sinks}
        examples |= _mask_arrays(case, first) | {"dropout_seed": first.dropout_seed}
        if first.slopes is not None:
            examples["slope"] = first.slopes
        plan = self._changed(plan, examples)
        workspace = self._workspace(plan, first.q) if self.algorithm is not None else None

        def run(index: int) -> Any:
            inputs = sets[index]
            named = {} if inputs.slopes is None else {"slope": inputs.slopes}
            operands = inputs.q, inputs.k, inputs.v
            named |= _mask_arrays(case, inputs)
            named |= {"sinks": inputs.sinks, "dropout_seed": inputs.dropout_seed, "out": inputs.out}
            return plan(*operands, workspace=workspace, **named)

        return run

    def _gradients(self, case: Case, sets: Sequence[Inputs]) -> Run:
        from flashgen import plan as make_plan
        from flashgen import plan_backward

        def arrays(inputs: Inputs, *names: str) -> dict[str, Any]:
            lengths = ("cu_seqlens_q", "cu_seqlens_kv") if case.is_packed else ()
            names = ("q", "k", "v", "out", "lse", "sinks", "dropout_seed", *lengths, *names)
            named = {name: getattr(inputs, name) for name in names}
            named |= {} if case.is_packed else _mask_arrays(case, inputs)
            return named if inputs.slopes is None else named | {"slope": inputs.slopes}

        first = sets[0]
        options = _options(case, first)
        if case.is_packed:
            longest = max(case.sequences)
            options |= {"cu_seqlens_q": first.cu_seqlens_q, "cu_seqlens_kv": first.cu_seqlens_kv}
            options |= dict(zip(("max_seqlen_q", "max_seqlen_kv"), longest, strict=True))
        forward = make_plan(first.q, first.k, first.v, out=first.out, return_lse=True, **options)
        for inputs in sets:
            forward(**arrays(inputs))
        operands = first.dout, first.q, first.k, first.v, first.out, first.lse
        written = {name: getattr(first, name) for name in ("dq", "dk", "dv", "dsinks")}
        plan = plan_backward(*operands, **written, **options, deterministic=case.deterministic)
        plan = self._changed(plan, arrays(first, "dout", *written))
        return lambda index: plan(**arrays(sets[index], "dout", *written))

    def _changed(self, plan: Plan, examples: Mapping[str, Any]) -> Plan:
        """The plan to time, for arrays like these."""
        if self._grouping is not None:
            plan = _pinned(plan, examples, lambda variant: variant.gqa == self._grouping)
        if self._target is not None:
            plan = _pinned(plan, examples, lambda variant: variant.target == self._target)
        if self._pinned is not None:
            plan = _pinned(plan, examples, lambda variant: variant.name == self._pinned)
        if self._steps is not None:
            plan = _cut(plan, examples, self._steps)
        self.plan, self.variant = plan, plan.variant.name
        return plan

    def _with_lengths(self, case: Case, sets: Sequence[Inputs]) -> Run:
        from flashgen import KVCache, Rotary
        from flashgen import plan as make_plan

        def keys(inputs: Inputs) -> tuple[Any, ...]:
            if case.is_packed:
                return inputs.k, inputs.v
            scales = ("k_scale",) if case.latent else ("k_scale", "v_scale")
            named = {name: getattr(inputs, name) for name in ("pages", *(scales if case.codes else ()))}
            named |= {"starts": inputs.kv_starts, "kv_dtype": "e4m3" if case.codes else None}
            if case.latent:
                return (KVCache(inputs.k, None, inputs.kv_lengths, head_dim_v=case.width_v, **named),)
            return (KVCache(inputs.k, inputs.v, inputs.kv_lengths, **named),)

        def appended(inputs: Inputs) -> dict[str, Any]:
            if not case.appends:
                return {}
            new, rotary = (inputs.k_new, inputs.v_new), Rotary(inputs.cos, inputs.sin)
            return {"append": new, "rotary": rotary}

        def named(inputs: Inputs) -> dict[str, Any]:
            names = ("cu_seqlens_q", "cu_seqlens_kv")
            return {name: getattr(inputs, name) for name in names} if case.is_packed else {}

        def queries(inputs: Inputs) -> dict[str, Any]:
            if not case.q_rope:
                return {"q": inputs.q}
            return {"q": inputs.q[..., : case.width_v], "q_rope": inputs.q[..., case.width_v :]}

        first = sets[0]
        bounds = {}
        if case.is_packed:
            longest = max(case.sequences)
            bounds = dict(zip(("max_seqlen_q", "max_seqlen_kv"), longest, strict=True))
        of_q = queries(first)
        plan = make_plan(
            of_q.pop("q"),
            *keys(first),
            **of_q,
            causal=case.is_causal,
            tree=first.tree,
            mask=first.line,
            indices=first.indices,
            out=first.out,
            **named(first),
            **appended(first),
            **bounds,
            softmax_scale=case.head_dim**-0.5 if case.latent else None,
        )
        if case.appends:
            self.variant = plan.variant.name
            return lambda index: plan(
                sets[index].q, *keys(sets[index]), **appended(sets[index]), out=sets[index].out
            )

        def arrays(inputs: Inputs) -> dict[str, Any]:
            names = ("kv_lengths", "kv_starts", "pages", "k_scale", "v_scale", "tree")
            if case.latent:
                names = ("kv_lengths", "pages", "k_scale", *(("indices",) if case.topk else ()))
            lengths = named(inputs) or {name: getattr(inputs, name) for name in names}
            values = {} if case.latent else {"v": inputs.v}
            values |= inputs.line.arguments if case.line else {}
            return {**queries(inputs), "k": inputs.k, **values, "out": inputs.out, **lengths}

        plan = self._changed(plan, arrays(first))
        return lambda index: plan(**arrays(sets[index]))

    def _workspace(self, plan: Plan, like: Any) -> Any:
        """Memory for every call of the plan, of the library of ``like``; None where it needs none."""
        self.workspace_bytes = plan.workspace_bytes
        return plan.kind.empty((plan.workspace_bytes,), like, None, "uint8") if plan.workspace_bytes else None


class FlashgenKept(_Own):
    """Plans for masks by a line whose lists of blocks are there beforehand, as a mask keeps them for layers
    after the first.
    """

    name = "flashgen-kept"

    def declines(self, case: Case) -> str | None:
        return None if case.line and case.lengths == "none" else "timed on masks by a line, without lengths"

    def prepare(self, case: Case, sets: Sequence[Inputs]) -> Run:
        from flashgen import plan as make_plan
        from flashgen.call.compute import make_plan as plan_of
        from flashgen.call.compute import with_kept_lists
        from flashgen.call.record import AttentionCall, GradientCall, call_of
        from flashgen.call.request import gradients_of, request_of

        names = ("dout", "q", "k", "v", "out", "lse", "dq", "dk", "dv") if case.is_backward else tuple("qkv")
        requests = []
        for inputs in sets:
            options = _options(case, inputs)
            named = {name: getattr(inputs, name) for name in (*names, "out")}
            if case.is_backward:
                operands = inputs.q, inputs.k, inputs.v
                forward = make_plan(*operands, out=inputs.out, return_lse=True, **options)
                forward(*operands, out=inputs.out, lse=inputs.lse, **_mask_arrays(case, inputs))
                options["deterministic"] = case.deterministic
            options["mask"] = inputs.line.keep_lists()
            record, request = (
                (GradientCall, gradients_of) if case.is_backward else (AttentionCall, request_of)
            )
            requests.append(with_kept_lists(request(call_of(record, **named, **options))))
        plan = plan_of(requests[0])
        self.variant = plan.variant.name
        return lambda index: plan(*requests[index].arrays)


class FlashgenFp8(_Own):
    """``flashgen.plan`` on e4m3 codes of the same arrays, which are made beforehand; with ``by_columns`` the
    tokens of v are contiguous.
    """

    # Of ‖out - ours‖ / ‖ours‖: q, k and v lose 2.5 % each, and P as much.
    tolerance = 0.1

    def __init__(self, name: str, accumulate: str, by_columns: bool) -> None:
        self.name = name
        self._accumulate, self._by_columns = accumulate, by_columns

    def declines(self, case: Case) -> str | None:
        plain = case.score == "none" and not (case.sinks or case.codes or case.latent)
        plain = plain and not (case.appends or case.left_padding)
        masks = (
            ("none", "causal") if case.lengths != "none" else ("none", "causal", "random", "blocks", "line")
        )
        if case.is_backward or not (plain and case.mask in masks):
            return "forward, without windows, scores and what a cache of 16 bits alone has"
        if self._by_columns and (case.lengths != "none" or case.seqlen_kv % 16):
            return "without lengths, and of multiples of 16 keys"
        return "fp16 and bf16 only" if case.dtype == "fp32" else None

    def prepare(self, case: Case, sets: Sequence[Inputs]) -> Run:
        from flashgen import KVCache, quantize
        from flashgen import plan as make_plan

        calls = []
        for inputs in sets:
            pairs = [quantize(x) for x in (inputs.q, inputs.k, inputs.v)]
            scales = dict(zip(("q_scale", "k_scale", "v_scale"), (scale for _, scale in pairs), strict=True))
            lengths = ("cu_seqlens_q", "cu_seqlens_kv") if case.is_packed else ()
            if case.lengths == "cache":
                lengths = ("kv_lengths", "pages")
            scales |= {name: getattr(inputs, name) for name in lengths}
            codes = [codes for codes, _ in pairs]
            if self._by_columns:
                codes[2] = _by_columns(codes[2])
            calls.append((codes, scales | {"out": inputs.out}))
        codes, named = calls[0]
        longest = max(case.sequences) if case.is_packed else (None, None)
        options = _options(case, sets[0]) if case.lengths == "none" else {"causal": case.is_causal}
        if case.lengths == "cache":
            cache = {name: named[name] for name in ("pages", "k_scale", "v_scale")}
            keys = KVCache(*codes[1:], named["kv_lengths"], kv_dtype="e4m3", **cache)
            codes, named = [codes[0], keys], {name: named[name] for name in ("q_scale", "out")}
        plan = make_plan(
            *codes,
            **named,
            **dict(zip(("max_seqlen_q", "max_seqlen_kv"), longest, strict=True)),
            dtype="e4m3",
            accumulate=self._accumulate,
            **options,
        )
        self.variant = plan.variant.name

        def run(index: int) -> Any:
            codes, named = calls[index]
            return plan(*codes, **named, **_mask_arrays(case, sets[index]))

        return run


def _by_columns(v: Any) -> Any:
    """The same array (batch, tokens, heads, columns) with contiguous tokens."""
    if hasattr(v, "permute"):
        return v.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    return v.transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2)


class FlashgenFixed(_Own):
    """``flashgen.plan`` on the same arrays without their lengths, where all sequences are equally long: what
    lengths cost.
    """

    name = "flashgen-fixed"

    def __init__(self) -> None:
        self._plain = Flashgen()

    def declines(self, case: Case) -> str | None:
        if case.is_backward:
            return "timed on forward passes"
        if case.lengths not in ("cache", "packed"):
            return "sequences that have lengths, and all the same"
        if case.sinks or case.left_padding or case.latent:
            return "no sinks, no padding, and no latent cache"
        if case.codes or case.mask in ("tree", "line"):
            return "no codes, no tree and no line"
        return "no pages, and nothing to append" if case.page_size or case.appends else None

    def prepare(self, case: Case, sets: Sequence[Inputs]) -> Run:
        fixed = replace(case, lengths="none")
        rows = [
            Inputs(
                *(x.reshape(shape) for x, shape in zip((s.q, s.k, s.v, s.out), shapes(fixed), strict=True)),
                mask=None,
            )
            for s in sets
        ]
        call = self._plain.prepare(fixed, rows)
        self.variant = self._plain.variant
        return lambda index: call(index).reshape(sets[index].out.shape)


def _mask_arrays(case: Case, inputs: Inputs) -> dict[str, Any]:
    """The arrays by which a plan takes the mask of a case."""
    if inputs.line is not None:
        return inputs.line.arguments
    if case.mask != "blocks":
        return {"mask": inputs.mask}
    return {"block_indptr": inputs.block_indptr, "block_indices": inputs.block_indices}


def _options(case: Case, inputs: Inputs) -> dict[str, Any]:
    """The options of a call without lengths."""
    from flashgen import BlockMask

    mask = inputs.mask if inputs.line is None else inputs.line
    if case.mask == "blocks":
        mask = BlockMask(inputs.block_indptr, inputs.block_indices, case.block)
    return {
        "causal": case.is_causal or bool(case.choice),
        "window_size": (case.window, 0) if case.mask == "window" else (-1, -1),
        "mask": mask,
        "softcap": SOFTCAP if case.score == "softcap" else None,
        "alibi_slopes": inputs.slopes,
        "sinks": inputs.sinks,
        "dropout_p": case.dropout_p,
        "dropout_seed": inputs.dropout_seed,
    }


def _pinned(plan: Plan, examples: Mapping[str, Any], keep: Callable[[Variant], bool]) -> Plan:
    """The same plan with the best of the variants to keep, whatever dispatch would take."""
    from flashgen.call.backends import prepare, specs_for
    from flashgen.operators.rules import LISTING
    from flashgen.runtime.device import device
    from flashgen.runtime.plans import Plan
    from flashgen.schedule.dispatch import offers
    from flashgen.schedule.plan import choices

    problem = plan.problem
    here = device(problem.device)
    # Family by family: which head dim is the least that serves differs.
    specs = specs_for(here)
    listing = [
        spec for spec in specs if spec.operator == LISTING
    ]  # a mask by a line takes their kernels first
    variants = (v for spec in specs for v in offers(problem, here, (spec, *listing)) if keep(v))
    runner = prepare(choices(problem, here, variants), here)
    return Plan(problem, runner, problem.operator.in_order(**examples))


def _cut(plan: Plan, examples: Mapping[str, Any], steps: int) -> Plan:
    """The same plan with only its first ``steps`` steps."""
    from flashgen.runtime import kernel
    from flashgen.runtime.device import device
    from flashgen.runtime.launch import Runner
    from flashgen.runtime.plans import Plan
    from flashgen.schedule.plan import plan_steps

    problem = plan.problem
    here = device(problem.device)
    planned = plan_steps(problem, plan.variant, here)
    planned = planned._replace(steps=planned.steps[:steps])
    runner = Runner(planned, here, [kernel.load(step.variant, here) for step in planned.steps])
    return Plan(problem, runner, problem.operator.in_order(**examples))
