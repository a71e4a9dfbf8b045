"""The names that a template finds of a Variant.

Every axis of its operator and every tile key are there by name, and beside them:

    variant, name, header (the file's first comment), target, threads, smem_bytes
    step                 the name of the kernel in its family
    features             the names of its features
    params_struct        the C struct, and param_names, the names of its members
    element_bytes        and kv_element, the C++ type of K and V in global memory
    has_lengths          whether the device has the length of each sequence
    layout               "sequences" if so, else "batch": a part of names of templates
    computes_gradients   whether it is a backward kernel
    has_tree             whether it hides drafts of a tree
    parts                the files of which one of several is taken (`source.parts`)
    pv_columns           columns of a P V of wgmma
    dq_widths            the columns of the MMAs of dQ, of a backward kernel on Hopper

Of a score modification:

    score                its name, or None
    score_functions, score_loads_by_key     see `source.scores`
    score_has_offset     whether a part of it is left to the row (`operators.lowering`)
    score_has_derivative whether the kernel multiplies by its derivative
    score_staged         the array whose elements it copies to shared memory, or None
    staged_dtype, staged_bytes, staged_row_stride, element_stages           of that array
    score_element        see `source.arrayelement`
    gradient_dtype, gradient_bytes          of the array that it is differentiated by

Of a mask by a line:

    rule                 its name, or None
    line_by              what a block hides scores by: "elements", "ranges" of the keys of a query, "either",
                         or "none"
    line_arrays          its arrays with an element for each token of queries ("q") or keys ("kv")
    rule_functions, range_function, range_functions                         see `source.rules`
    verdict_functions    see `source.verdicts`
    row_spans, key_spans, block_spans       the arrays of whose blocks there are bounds
    line_runs            by name, the places among key_spans of the arrays whose runs range_functions need
    is_pack              whether it counts tokens of several sequences
    skips_by_line        whether a kernel with lengths has verdicts of KV blocks
    tiles_in_order       whether tiles come in the order of their lists, by a line or of a caller
    length_classes       how many classes of lengths that order has
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashgen.families.variant import ELEMENT_STAGES
from flashgen.operators import OPERATORS
from flashgen.source.params import struct_text
from flashgen.source.parts import parts_of, pv_columns, skips_by_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashgen.families.variant import Variant
    from flashgen.operators.formula import Node
    from flashgen.operators.rules import Rule
    from flashgen.source.verdicts import Span


def context(form: Variant, header: str) -> dict[str, Any]:
    of_score = _of_score(form)
    return {
        "score": None,
        # Of kernels whose tiles say nothing of these.
        "cluster": 1,
        "loop": "shares",
        "dq_widths": [],
        "held_k": 0,
        **form.axis_values,
        **_of_tree(form),
        **_of_tile(form, of_score["score_has_derivative"]),
        **of_score,
        "parts": parts_of(form, of_score["score_has_derivative"], of_score["score_has_offset"]),
        **_of_rule(form),
        "pv_columns": pv_columns(form),
        "variant": form,
        "name": form.name,
        "has_lengths": form.has_lengths,
        "layout": "sequences" if form.has_lengths else "batch",
        "computes_gradients": OPERATORS[form.operator].differentiates,
        "target": form.target,
        "step": form.step,
        "features": form.features,
        "header": header,
        "params_struct": struct_text(form.params),
        "param_names": frozenset(param.name for param in form.params),
        "element_bytes": form.element_bytes,
        "kv_element": "element" if form.axis_values.get("kv_dtype", "none") == "none" else "e4m3",
        "threads": form.threads,
        "smem_bytes": form.smem_bytes,
    }


def _of_tree(form: Variant) -> dict[str, Any]:
    """A kernel with a tree is one with a window that hides drafts as well."""
    mask_type = {"mask_type": "local"} if form.axis_values.get("mask_type") == "tree" else {}
    return mask_type | {"has_tree": any(param.name == "tree" for param in form.params)}


def _of_tile(form: Variant, has_derivative: bool) -> dict[str, Any]:
    """The keys of the tile, and ``dq_widths``: the columns of an MMA of dQ whose dS is in shared memory.

    The tiles of backward kernels on Hopper were measured without a score modification. Some keys give way to
    one, and more to its derivative, which takes registers.
    """
    tile: dict[str, Any] = dict(form.tile)
    if "dq_address" in tile:  # consumers that are alike: all columns of K, or the columns of a panel
        outer = form.head_dim - 64
        tile["dq_widths"] = [form.head_dim] if tile["block_m"] == 128 else list(dict.fromkeys((64, outer)))
        if form.score is not None:
            tile |= {"dq_address": "free", "mask_bounds": "computed", "steps": "all"}
            tile |= {"starts": "free"} if form.axis_values["mask_type"] == "local" else {}
        if has_derivative:
            tile |= {"lse": "late", "held_k": 0, "held_v": 0}
    elif "dq" in tile:  # a consumer of dV and one of dK; in a cluster each has a part of the other panels
        outer = form.head_dim // 2 - 64
        tile["dq_widths"] = [64] if tile["cluster"] == 1 else list(dict.fromkeys((64, outer)))
        tile["lse"] = "early"
        if has_derivative:
            tile |= {"held_k": 0, "held_v": 0}
    return tile


def _of_score(form: Variant) -> dict[str, Any]:
    if form.score is None:
        absent = {
            "score_has_offset": False,
            "score_has_derivative": False,
            "score_staged": None,
            ELEMENT_STAGES: 0,
        }
        return {"score_functions": "", "score_element": "", **_of_gradient("fp32"), **absent}
    # Only a call with a modification waits for these.
    from flashgen.operators.scores import DTYPE_BYTES, TYPES
    from flashgen.source.arrayelement import element_function
    from flashgen.source.scores import loads_by_key, score_functions

    differentiated = OPERATORS[form.operator].differentiates
    lowered = form.score.lowered(form.dtype, differentiated)
    dtypes = {array.name: array.dtype for array in form.score.arrays}
    staged = form.staged
    strides = staged.argument().stride_names() if staged else ()
    kernel = (form.score, form.dtype, differentiated, staged and staged.name)
    return {
        "score_functions": score_functions(*kernel),
        "score_loads_by_key": loads_by_key(*kernel),
        "score_has_offset": lowered.offset is not None,
        "score_has_derivative": lowered.derivative is not None,
        "score_staged": staged and staged.name,
        "staged_dtype": staged and TYPES[staged.type].ctype,
        "staged_bytes": staged and DTYPE_BYTES[staged.dtype],
        "element_stages": dict(form.tile).get(ELEMENT_STAGES, 0),
        "staged_row_stride": staged and strides[staged.dimensions.index("q")],
        "score_element": element_function(form.score),
        **_of_gradient(dtypes.get(form.score.wrt, "fp32")),
    }


def _of_gradient(dtype: str) -> dict[str, Any]:
    return {"gradient_dtype": dtype, "gradient_bytes": 4 if dtype == "fp32" else 2}


# What a template finds of a mask by a line, beside ``rule``, ``line_by`` and ``line_arrays``.
_OF_LINE = (
    "rule_functions",
    "range_function",
    "range_functions",
    "verdict_functions",
    "row_spans",
    "key_spans",
    "block_spans",
    "is_pack",
    "skips_by_line",
    "line_runs",
    "tiles_in_order",
    "length_classes",
)


def _of_rule(form: Variant) -> dict[str, Any]:
    rule = form.rule
    if rule is None and form.operator != "mask_lists":
        no_arrays: dict[str, Any] = {"q": (), "kv": ()}
        absent = dict.fromkeys(_OF_LINE, "") | {"tiles_in_order": form.hands_out_tiles}
        return {"rule": None, "line_by": "none", "line_arrays": no_arrays, **absent}
    from flashgen.families.masks import rule_of_line
    from flashgen.operators.linetable import LENGTH_CLASSES
    from flashgen.source.rules import range_function, ranges_functions, rule_functions, runs_of
    from flashgen.source.verdicts import spans_of, verdict_functions

    if rule is None:  # kernels that make lists have a line, if need be this one
        rule = rule_of_line("kv <= q")
    of_one_length = not form.has_lengths
    spans = spans_of(rule, of_one_length)
    ranges = ranges_functions(rule) if of_one_length else ()
    runs = _runs(runs_of(rule), spans) if of_one_length else {}
    return {
        "rule": rule.name,
        "line_by": "elements" if not ranges else "either" if runs else "ranges",
        "line_arrays": _arrays_of_tokens(rule),
        "rule_functions": rule_functions(rule, packed_heads=form.has_lengths),
        "range_function": range_function(rule),
        "range_functions": ranges,
        "verdict_functions": verdict_functions(rule, of_one_length),
        "row_spans": [span for span in spans if span.position == "q"],
        "key_spans": [span for span in spans if span.position == "kv"],
        "block_spans": [span for span in spans if span.position == "block"],
        "is_pack": rule.pack is not None,
        "skips_by_line": skips_by_line(form),
        "line_runs": runs,
        "tiles_in_order": _in_order(form),
        "length_classes": LENGTH_CLASSES,
    }


def _arrays_of_tokens(rule: Rule) -> dict[str, list[str]]:
    """The arguments with an element for each token of queries, and for each of keys."""
    names: dict[str, list[str]] = {"q": [], "kv": []}
    for array in rule.arrays:
        if array.per_token is not None:
            names["q" if array.per_token == "q" else "kv"].append(array.argument_name)
    return names


def _in_order(form: Variant) -> bool:
    """Whether tiles come in the order of their lists of a mask by a line."""
    if form.rule is None or form.has_lengths:
        return False
    if OPERATORS[form.operator].differentiates:
        return "key_order" in {param.name for param in form.params}
    return form.hands_out_tiles


def _runs(elements: Mapping[str, Node], spans: Sequence[Span]) -> dict[str, int]:
    """By name, the places of the arrays whose runs are needed, among the arrays that are read by keys."""
    by_key = [span.node for span in spans if span.position == "kv"]
    return {name: by_key.index(element) for name, element in elements.items()}
