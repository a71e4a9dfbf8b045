"""Options that several commands share, and the variants that they choose among."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashgen.families.model import Spec
    from flashgen.families.variant import Variant
    from flashgen.toolchain.cache import CubinCache

NATIVE = "native"

select_option = click.option(
    "--select",
    "selections",
    multiple=True,
    metavar="TERMS",
    help="Only variants that satisfy every term: 'head_dim=128 dtype=fp16,bf16', 'head_dim>=128 "
    "gqa!=packed', 'target=sm80 tile=default', or a name or glob. Repeatable; the selections add up.",
)

specs_option = click.option(
    "--specs",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="A folder of your own specs, in addition to the shipped specs and FLASHGEN_SPECS. A file "
    "with the name of a shipped one replaces it.",
)

score_option = click.option(
    "--score",
    metavar="NAME",
    help="The kernels with this score modification, such as softcap, instead of the plain ones. "
    "Or a formula, whose parameters are f32.",
)

jobs_option = click.option(
    "--jobs",
    "-j",
    type=click.IntRange(min=1),
    metavar="N",
    help="How many to compile at once. [default: one per processor]",
)

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document instead of a table."
)


def refuse_beside(what: str, options: Mapping[str, Any]) -> None:
    """That none of these options, by their names, is given beside one which leaves them nothing to say.
    ``what`` it does begins the message. Raises UsageError.
    """
    beside = [name for name, value in options.items() if value not in (None, ())]
    if beside:
        raise click.UsageError(f"{what}; leave out {', '.join(beside)}")


class _Output(click.Path):
    """A path to write to. An empty one, as of a variable that a shell does not know, would be the current
    folder.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path."""
        if value == "":
            self.fail(f"the path is empty; name a {'file' if self.file_okay else 'folder'}", param, ctx)
        return super().convert(value, param, ctx)


class OutputFolder(_Output):
    """The path of a folder to write into. It need not exist."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)


class OutputFile(_Output):
    """The path of a file to write, in a folder that exists: told before the work, not after it."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, in a folder that exists."""
        path = super().convert(value, param, ctx)
        if not path.parent.is_dir():
            self.fail(f"there is no folder {str(path.parent)!r} to write {path.name!r} into", param, ctx)
        return path


class Architecture(click.ParamType):
    """A GPU architecture: `sm_90`, `90` or `9.0`, or `native` for the GPU of this machine.

    The suffix of `sm_90a` may be there and is left out: which variants need it is in their specs.
    """

    name = "architecture"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name that nvcc uses, such as sm_90."""
        if value == NATIVE:
            from flashgen.runtime.device import available, device, why_unavailable

            if not available():
                self.fail(f"native needs a working GPU: {why_unavailable()}", param, ctx)
            return device(0).arch
        match = re.fullmatch(r"(?:sm_?|compute_)?(\d{1,2})\.?(\d)([af]?)", value)
        if match is None:
            self.fail(f"{value!r} is not an architecture; write sm_80, sm_90, ... or {NATIVE}", param, ctx)
        return f"sm_{match[1]}{match[2]}"


archs_option = click.option(
    "--arch",
    "archs",
    type=Architecture(),
    multiple=True,
    help="Only for this architecture: sm_90, or native. Repeatable.",
)


class ShapeType(click.ParamType):
    """The shape of an array: `1x4096x16x128`."""

    name = "shape"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """The extents."""
        if isinstance(value, tuple):
            return value
        if not re.fullmatch(r"\d{1,18}(?:[x,]\d{1,18})*", value):
            self.fail(
                f"{value!r} is not a shape; write BATCHxSEQLENxHEADSxHEAD_DIM: 1x4096x16x128", param, ctx
            )
        return tuple(int(extent) for extent in re.split("[x,]", value))


class SplitsType(click.ParamType):
    """What ``splits`` of attention() may be: `auto`, `4`, or `every:1024` for SplitEvery(1024)."""

    name = "splits"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value that attention() takes."""
        from flashgen.errors import BadParam
        from flashgen.operators.splits import SplitEvery, splits_of

        number = value.removeprefix("every:")
        number = int(number) if number.isdecimal() and len(number) < 19 else number
        try:
            return SplitEvery(number) if value.startswith("every:") else splits_of(number)
        except BadParam as error:
            self.fail(str(error), param, ctx)


class MaskType(click.ParamType):
    """A mask type by the words and numbers of attention(), as one of its four names."""

    name = "mask type"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Such as causal_bottom_right for causal, 3, and itself."""
        from flashgen.errors import BadParam
        from flashgen.operators.maskoptions import mask_type_name

        try:
            return mask_type_name(int(value) if value.isdecimal() and len(value) < 19 else value)
        except BadParam as error:
            self.fail(str(error), param, ctx)


mask_type_option = click.option(
    "--mask-type",
    type=MaskType(),
    metavar="WORD",
    help="As in attention(): none, dense, causal (bottom right) or causal_top_left, or 0 to 3.",
)


def load_variants(specs: Path | None, cache: CubinCache | None = None) -> tuple[Variant, ...]:
    """Every variant of the shipped specs, of the folders of FLASHGEN_SPECS, and of one more folder, with the
    tiles that were tuned on the first GPU of this machine, and the committed ones with a score modification.

    ``cache`` keeps the checked specs for the calls to come. Raises SpecError for a wrong spec, and for a
    template that is not there.
    """
    from flashgen.call.fields import PLAN_KEYWORDS
    from flashgen.families.scores import load_scores

    plain = tuple(variant for spec in _checked_specs(specs, cache) for variant in spec.variants())
    return (*plain, *load_scores(specs, keywords=PLAN_KEYWORDS).of(plain))


def variant_named(specs: Path | None, name: str) -> Variant:
    """The one of `load_variants` that ``name`` means, as `find_one`.

    To make all variants takes seconds. So one spec's are made at a time, until one has the name. The specs
    whose names are most like it come first.
    """
    from flashgen.families.selection import find_one, stem_of

    stem = stem_of(name)
    for spec in sorted(_checked_specs(specs), key=lambda spec: _alike(spec.name, stem), reverse=True):
        for variant in spec.variants():
            if variant.name == stem:
                return variant
    return find_one(load_variants(specs), name)


def _checked_specs(specs: Path | None, cache: CubinCache | None = None) -> tuple[Spec, ...]:
    """The specs of `load_variants`."""
    from flashgen.families.load import load_specs
    from flashgen.families.tuned import present_gpu
    from flashgen.source.render import check_files, warn_of_unused_overrides

    loaded = load_specs(specs, cache, present_gpu())
    check_files(loaded)
    warn_of_unused_overrides(loaded)
    return loaded


def _alike(a: str, b: str) -> int:
    """How many characters are the same at the start, and at the end."""
    pairs = (zip(a, b, strict=False), zip(reversed(a), reversed(b), strict=False))
    return sum(len(list(takewhile(lambda pair: pair[0] == pair[1], each))) for each in pairs)


def variants_on_offer() -> tuple[Variant, ...]:
    """Those that dispatch chooses among where a call asks for no family by name."""
    return tuple(variant for variant in load_variants(None) if not variant.dispatch.on_request)


def chosen_variants(
    specs: Path | None, selections: Sequence[str], cache: CubinCache | None = None, score: str | None = None
) -> tuple[Variant, ...]:
    """The variants that --specs and --select leave, with the modification of --score; ``cache`` as in
    `load_variants`.
    """
    from flashgen.families.selection import select

    return with_score(select(load_variants(specs, cache), selections), specs, score)


def with_score(variants: Sequence[Variant], specs: Path | None, score: str | None) -> tuple[Variant, ...]:
    """The variants with a score modification: those that have a seam for it and none yet."""
    from flashgen.call.fields import PLAN_KEYWORDS
    from flashgen.families.formulas import modification
    from flashgen.families.scores import load_scores

    if score is None:
        return tuple(variants)
    by_name = load_scores(specs, keywords=PLAN_KEYWORDS).by_name
    chosen = modification(score, by_name, {}, keywords=PLAN_KEYWORDS)
    if chosen is None:
        raise click.BadParameter(
            f"there is no score modification {score!r}; there are {', '.join(by_name)}, and formulas "
            "that read `score`",
            param_hint="--score",
        )
    suited = [variant for variant in variants if variant.score_seam and variant.score is None]
    if not suited:
        raise click.BadParameter(
            "none of the chosen kernels takes a score modification", param_hint="--score"
        )
    return tuple(variant.modified(chosen) for variant in suited)
