"""The main kernels of the backward families, by name."""

from flashgen.families.load import load_specs

MAIN = {
    variant.name: variant
    for spec in load_specs()
    if spec.operator == "attention_backward" and not spec.has_lengths
    for variant in spec.variants()
    if variant.is_main
}
