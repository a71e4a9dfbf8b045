"""`flashgen schema`: the JSON Schema of spec files, for editors."""

from __future__ import annotations

import click


@click.command(
    "schema",
    short_help="The JSON Schema of specs, scores and masks, for an editor.",
    epilog="""
\b
Examples:
  flashgen schema > spec.json
  flashgen schema scores > scores.json
  flashgen schema masks > masks.json

An editor with yaml-language-server then completes and checks a spec that begins with the line

\b
  # yaml-language-server: $schema=spec.json
""",
)
@click.argument("kind", type=click.Choice(["spec", "scores", "masks"]), default="spec")
def command(kind: str) -> None:
    """Print the JSON Schema of a spec, or of a file scores.yaml or masks.yaml.

    Loading a file also checks what depends on its axes.
    """
    from flashgen.families.jsonschema import schemas
    from flashgen.tools.cli.output import print_json

    print_json(schemas()[kind])
