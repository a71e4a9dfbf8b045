"""One kernel to be rendered: a point of a spec's axes, for one target, with the tile that serves it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flashgen.errors import SpecError
from flashgen.families.arch import arch_parts, reaches
from flashgen.families.dispatch import Dispatch
from flashgen.families.features import STAGES_SCORES, STREAMS_SCORES
from flashgen.families.grid import Buffer, Grid
from flashgen.families.params import Param, rule_params, score_params
from flashgen.operators import OPERATORS
from flashgen.operators.arguments import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.families.grid import Visits
    from flashgen.operators.rules import Rule
    from flashgen.operators.scores import Score, ScoreParam

# Name of the tile that `flashgen tune` measured on the GPU at hand; no row of a spec may take it.
TUNED_TILE = "tuned"
# The tile key of a modified variant: buffers of a block's elements of the score modification.
ELEMENT_STAGES = "element_stages"
# The tile key of registers of a producer thread. Warps that copy such elements need 40; where three consumers
# need as many as they can get, they have 32.
PRODUCER = "producer_registers"
# What conditions and selections call a tile without a name.
DEFAULT_TILE = "default"

# The lists of key blocks that a step makes of a mask by a line.
_LINE_LISTS = (
    Buffer("line_indptr", "int32", ("block_indptr_batch * block_indptr_num_heads", "block_indptr_size")),
    Buffer("line_indices", "int32", ("block_entries",)),
    Buffer("line_totals", "int32", ("block_indptr_batch * block_indptr_num_heads",)),
)

_LINE_ROWS = Buffer("line_rows", "int32", ("packed_rows", "4"))

# The order of the tiles of a caller's lists, and what a kernel reads instead if its mask is by a line.
_TILE_ORDER = "tile_order"
_OF_TABLES = {
    _TILE_ORDER: Param("block_indptr", "int32_t*", "for each list a table"),
    "block_indptr_batch": Param("block_indptr_batch_stride", "int64_t"),
    "block_indptr_num_heads": Param("block_indptr_head_stride", "int64_t"),
}

_GQA_SUFFIX = {"mha": "", "gqa": "gqa", "packed": "packgqa"}

# Of a field that is beside the kernel: what the source never depends on.
_BESIDE = {"beside": True}


@dataclass(frozen=True, slots=True)
class Variant:
    """An immutable, hashable description of one kernel.

    ``axes`` and ``tile`` keep the order of the spec. ``name`` is derived from them; it is the stem of the
    generated file and the symbol of the kernel. ``step`` names the kernel among the kernels of its family,
    and is empty if there is one. ``features`` names what it does and other variants of its family do not
    (`features`), ``score`` is its score modification, ``rule`` its mask by a line. ``smem_bytes`` is the
    dynamic shared memory of a block in bytes, ``max_smem`` what the target allows. ``has_lengths`` is whether
    the kernel reads the lengths of sequences on the device.

    The fields from ``archs`` on are beside the kernel: how it is chosen, launched and checked. ``dispatch``
    is what dispatch gets from the spec. ``grid`` says what a launch covers, ``visits`` how a tile walks the
    scores (None: the kernel has no such walk). ``priority`` is the position of the target in its spec; lower
    is preferred. ``no_spills`` is whether the spec promises that no register is spilled, or the architectures
    on which it does. ``dependent_launch`` is whether the kernel itself waits for the one before it in its
    stream, ``score_seam`` whether it can modify scores.

    The variant that dispatch chooses ``is_main``. The variants of the other steps of a call come ``before``
    and ``after`` it, and share the ``workspace``. Calls that split no tile leave out a step that
    ``combines``.
    """

    family: str
    spec: str
    template: str
    target: str
    min_arch: str
    max_smem: int
    axes: tuple[tuple[str, str | int], ...]
    tile: tuple[tuple[str, int | str], ...]
    tile_name: str
    threads: int
    smem_bytes: int
    element_bytes: int
    params: tuple[Param, ...]
    header: str
    operator: str = "attention"
    has_lengths: bool = False
    step: str = ""
    features: tuple[str, ...] = ()
    score: Score | None = None
    rule: Rule | None = None
    spec_dir: str = field(default="", repr=False)
    options: tuple[str, ...] = ()
    archs: tuple[str, ...] = field(default=(), metadata=_BESIDE)
    dispatch: Dispatch = field(default=Dispatch(), metadata=_BESIDE)
    grid: Grid = field(default=Grid(), metadata=_BESIDE)
    visits: Visits | None = field(default=None, metadata=_BESIDE)
    workspace: tuple[Buffer, ...] = field(default=(), metadata=_BESIDE)
    priority: int = field(default=0, metadata=_BESIDE)
    committed: bool = field(default=False, metadata=_BESIDE)
    no_spills: bool | tuple[str, ...] = field(default=False, metadata=_BESIDE)
    dependent_launch: bool = field(default=False, metadata=_BESIDE)
    score_seam: bool = field(default=False, metadata=_BESIDE)
    combines: bool = field(default=False, metadata=_BESIDE)
    is_main: bool = field(default=True, metadata=_BESIDE)
    before: tuple[Variant, ...] = field(default=(), metadata=_BESIDE, repr=False)
    after: tuple[Variant, ...] = field(default=(), metadata=_BESIDE, repr=False)
    name: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "name", variant_name(self.family, dict(self.axes), self.target, self.tile_name, self.step)
        )

    def __hash__(self) -> int:
        return hash((self.name, self.spec))

    def __str__(self) -> str:
        return self.name

    @property
    def axis_values(self) -> dict[str, str | int]:
        """The value of each axis of the spec and of the operator; of one that the spec does not have, what
        the operator says it stands for.
        """
        return OPERATORS[self.operator].axis_values(dict(self.axes))

    def axis(self, name: str) -> str | int:
        """The value of one axis, as in `axis_values`. Raises KeyError for an axis that neither has."""
        values = dict(self.axes)
        if name not in values:
            values = self.axis_values
        return _lookup(tuple(values.items()), name)

    def tile_value(self, name: str) -> int | str:
        """The value of one tile key, such as ``block_m`` or ``loop``. Raises KeyError for a key that the spec
        does not have.
        """
        return _lookup(self.tile, name)

    @property
    def head_dim(self) -> int:
        return self.axis("head_dim")

    @property
    def head_dim_v(self) -> int:
        """The head dim of v and the output; the head dim of q and k if the spec has no axis for it."""
        return self.axis("head_dim_v")

    @property
    def dtype(self) -> str:
        return self.axis("dtype")

    @property
    def mask_type(self) -> str:
        return self.axis("mask_type")

    @property
    def gqa(self) -> str:
        return self.axis("gqa")

    @property
    def filename(self) -> str:
        """Name of the file under ``generated/``."""
        return f"{self.name}.cu"

    def rendered_form(self) -> Variant:
        """This variant with everything that must not reach the source at a fixed value.

        Templates see this form and ``render.source_digest`` hashes it, so tuning dispatch, or choosing other
        architectures and promises, neither changes a generated file nor invalidates a compiled one.
        """
        return dataclasses.replace(
            self, **{it.name: it.default for it in dataclasses.fields(self) if it.metadata == _BESIDE}
        )

    def modified(self, score: Score, committed: bool = False, streams: bool = True) -> Variant:
        """This variant, and the other steps of its calls, with a score modification. ``streams`` as for
        `_staging`.

        It promises nothing of registers: the tile was chosen for plain scores. Raises SpecError for a
        parameter whose name the kernel has already.
        """
        around = {
            "before": tuple(variant.modified(score) for variant in self.before),
            "after": tuple(variant.modified(score) for variant in self.after),
        }
        if not self.score_seam:
            return dataclasses.replace(self, **around) if self.before or self.after else self
        names = {param.name for param in self.params}
        added = score_params(score, self.dtype, OPERATORS[self.operator].differentiates)
        # Kernels that scale gradients read the scale anyway.
        added = tuple(param for param in added if param.name != "softmax_scale" or param.name not in names)
        axis = ("score", score.name)
        return self._extended(
            axis,
            score.title,
            added,
            score=score,
            committed=committed,
            **self._staging(score, streams),
            **around,
        )

    def _staging(self, score: Score, streams: bool) -> dict[str, Any]:
        """The features, the shared memory and the tile with a score. As long as there is room, a main kernel
        that can stage elements of its array has a buffer for each score of a block; one that streams them has
        two if they fit, with their barriers. Unless it ``streams``, consumers copy elements, as if it could
        not.
        """
        if STAGES_SCORES not in self.features:
            return {}
        if not streams:
            features = tuple(name for name in self.features if name != STREAMS_SCORES)
            staging = dataclasses.replace(self, features=features)._staging(score, streams=True)
            return {"features": features} | staging
        left = self.max_smem - self.smem_bytes
        block_m = int(self.tile_value("block_m"))
        block = block_m * int(self.tile_value("block_n"))
        if self.is_main and STREAMS_SCORES in self.features and score.streamed:
            of_stage = DTYPE_BYTES[score.streamed.dtype] * block + block_m // 64 * 2 * 8
            stages = min(2, left // of_stage)
            if stages:
                tile = dict(self.tile) | {ELEMENT_STAGES: stages}
                tile[PRODUCER] = max(32 if block_m > 128 else 40, int(tile[PRODUCER]))
                return {"smem_bytes": self.smem_bytes + stages * of_stage, "tile": tuple(tile.items())}
        elif self.is_main and score.staged and 2 * block <= left:
            return {"smem_bytes": self.smem_bytes + 2 * block}
        none = (STAGES_SCORES, STREAMS_SCORES)
        return {"features": tuple(name for name in self.features if name not in none)}

    @property
    def streams(self) -> bool:
        """Whether warps of the producer copy the elements of the score modification."""
        return ELEMENT_STAGES in dict(self.tile)

    @property
    def staged(self) -> ScoreParam | None:
        """The array of the score modification whose elements the kernel has in shared memory."""
        if self.score is None or STAGES_SCORES not in self.features:
            return None
        return self.score.streamed if STREAMS_SCORES in self.features else self.score.staged

    @property
    def line_seam(self) -> bool:
        """Whether calls with a mask by a line may take this kernel: one that visits or makes lists of key
        blocks, or, of attention with lengths, one with a window, which evaluates the line for each score.
        """
        axes = self.axis_values
        if not self.has_lengths:
            return axes.get("mask_type") == "blocks"
        serves = {"mask_type": "local", "dropout": "none", "kv_starts": "none"}
        return self.operator == "attention" and all(axes.get(name) == value for name, value in serves.items())

    def lined(self, rule: Rule, listing: Sequence[Variant] = ()) -> Variant:
        """This variant, which has a seam for it, with a mask by a line. If it visits lists of key blocks, the
        steps of ``listing`` make the lists first, for blocks as large as the tile of this variant. Without
        such steps the lists are arguments of the call.

        It promises nothing of registers. Raises SpecError for a parameter whose name the kernel has already.
        """
        first = [step._with_line(rule, is_main=False, before=(), after=()) for step in listing]
        before = [step for step in self.before if not step._writes_order]
        first += [step.lined(rule) if step.operator == "mask_lists" else step for step in before]
        lists = (*listing[0].workspace, *_LINE_LISTS) if listing else ()
        if rule.pack is not None and (listing or self.operator == "mask_lists"):
            lists = (*lists, _LINE_ROWS)
        kept = (buffer for buffer in self.workspace if buffer.name != _TILE_ORDER)
        return self._with_line(rule, before=tuple(first), workspace=(*kept, *lists))

    def _with_line(self, rule: Rule, **fields: Any) -> Variant:
        axis = ("mask", rule.name)
        lists = self.operator == "mask_lists"
        tables = () if lists or self.has_lengths else self._tables()
        params = rule_params(rule, self.step if lists else "", tables)
        if self.is_main and "lse_log2" in {param.name for param in self.params} and self.target == "sm90":
            fields["smem_bytes"] = self.smem_bytes + self._bytes_of_ranges(rule)
        variant = self._extended(axis, rule.title, params, rule=rule, committed=False, **fields)
        if not self.hands_out_tiles:
            return variant
        params = tuple(_OF_TABLES.get(param.name, param) for param in variant.params)
        return dataclasses.replace(variant, params=params)

    @property
    def hands_out_tiles(self) -> bool:
        """Whether thread blocks take the next tile of a table, which counts them."""
        has_table = any(
            x.name in (_TILE_ORDER, "block_indptr") and x.ctype == "int32_t*" for x in self.params
        )
        return has_table and any(x.name == "num_tiles" for x in self.params)

    @property
    def _writes_order(self) -> bool:
        """Whether this is the step that writes the order of the tiles of a caller's lists."""
        return not self.is_main and any(param.name == _TILE_ORDER for param in self.params)

    def _bytes_of_ranges(self, rule: Rule) -> int:
        """Shared memory of a backward kernel for the ranges of keys that queries of its steps see."""
        from flashgen.operators.keyranges import num_ranges

        return int(self.tile_value("stages")) * int(self.tile_value("block_m")) * 8 * num_ranges(rule)

    def _tables(self) -> tuple[str, ...]:
        """Arrays of lists of key blocks that this kernel reads with a mask by a line alone."""
        has, makes = {param.name for param in self.params}, {buffer.name for buffer in self.workspace}
        ordered = makes & {"key_order"} and self.axis_values["dq_order"] == "none"
        has_table = has & {"block_indptr", _TILE_ORDER}
        return (*(() if has_table else ("block_indptr",)), *(("key_order",) if ordered else ()))

    def _extended(
        self, axis: tuple[str, str], title: str, added: tuple[Param, ...], **fields: Any
    ) -> Variant:
        """This variant with a score or a mask, its ``axis`` and its parameters. Raises SpecError for a
        parameter whose name the kernel has already.
        """
        taken = {param.name for param in self.params} & {param.name for param in added}
        if taken:
            raise SpecError(
                f"the {axis[0]} {title}: {self.name} already has parameters called {', '.join(taken)}"
            )
        return dataclasses.replace(
            self,
            axes=(*self.axes, axis),
            params=(*self.params, *added),
            no_spills=False,
            **fields,
        )

    @property
    def steps(self) -> tuple[Variant, ...]:
        """The kernels of a call that dispatch gives this one, in order."""
        return (*self.before, self, *self.after)

    def code_for(self, arch: str) -> str | None:
        """The architecture to compile for, so that GPUs of ``arch`` run the code: "sm_90a" for "sm_90" where
        the spec needs or lists it with a suffix. None where such GPUs do not run this kernel.

        A suffix of ``arch`` itself has no say: a GPU has none.
        """
        number = arch_parts(arch)[0]
        if not reaches(number, self.min_arch):
            return None
        named = [name for name in (self.min_arch, *self.archs) if arch_parts(name)[0] == number]
        return next((name for name in named if arch_parts(name)[1]), f"sm_{number}")

    def must_not_spill(self, arch: str) -> bool:
        """Whether the spec promises that this kernel spills no register on ``arch``, such as "sm_90"."""
        return self.no_spills if isinstance(self.no_spills, bool) else arch in self.no_spills

    def as_dict(self) -> dict[str, Any]:
        """Plain types for JSON: axes and tile as mappings, parameters by name."""
        return {
            "name": self.name,
            "family": self.family,
            "spec": self.spec,
            "template": self.template,
            "target": self.target,
            "min_arch": self.min_arch,
            "archs": list(self.archs),
            "axes": dict(self.axes),
            "tile": dict(self.tile),
            "tile_name": self.tile_name,
            "threads": self.threads,
            "smem_bytes": self.smem_bytes,
            "max_smem": self.max_smem,
            **{name: value for name, value in self.dispatch._asdict().items() if name != "prefer"},
            "committed": self.committed,
            "no_spills": self.no_spills if isinstance(self.no_spills, bool) else list(self.no_spills),
            "options": list(self.options),
            "operator": self.operator,
            "has_lengths": self.has_lengths,
            "step": self.step,
            "features": list(self.features),
            "grid": {"covers": dict(self.grid.covers), "schedule": self.grid.schedule},
            "dependent_launch": self.dependent_launch,
            "combines": self.combines,
            "score_seam": self.score_seam,
            "score": None if self.score is None else {"name": self.score.name, "formula": self.score.text},
            "rule": None if self.rule is None else {"name": self.rule.name, "line": self.rule.text},
            "params": [param.name for param in self.params],
        }


def variant_name(
    family: str, axes: dict[str, str | int], target: str, tile_name: str = "", step: str = ""
) -> str:
    """File stem and symbol: ``flash_fwd_hdim128_fp16_causal_m64_gqa_sm80``.

    The order is family, step, head dim (``hdim192_128`` if v has another), dtype, mask type, any
    further axis, tile, grouping, target. A value of ``none`` (and ``mha`` for the grouping, ``main`` for the
    step) says the ordinary and is left out; a numeric axis carries its own name in front.
    """
    parts = [family, "" if step == "main" else step]
    for axis, value in axes.items():
        ordinary = value == "none" or (axis == "head_dim_v" and value == axes.get("head_dim"))
        if axis != "gqa" and not ordinary:
            parts.append(name_part(axis, value))
    gqa = str(axes.get("gqa", "mha"))
    parts += [tile_name, _GQA_SUFFIX.get(gqa, gqa), target]
    return "_".join(part for part in parts if part)


def name_part(axis: str, value: str | int) -> str:
    """What a value of an axis adds to a name."""
    if isinstance(value, str):
        return value
    return {"head_dim": f"hdim{value}", "head_dim_v": str(value)}.get(axis, f"{axis}{value}")


def _lookup(pairs: tuple[tuple[str, Any], ...], name: str) -> Any:
    for key, value in pairs:
        if key == name:
            return value
    raise KeyError(f"{name!r}; there are {', '.join(key for key, _ in pairs)}")
