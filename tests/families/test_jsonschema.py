"""The JSON Schema accepts what loading accepts, and refuses wrong keys and values; the copies are current."""

import json
import re

import pytest
import yaml
from click.testing import CliRunner

from flashgen.families.jsonschema import schemas
from flashgen.host.paths import specs_dir
from flashgen.tools.cli import main

SPECS = sorted(path for path in specs_dir().glob("*.yaml") if path.name not in ("scores.yaml", "masks.yaml"))
_TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "number": (int, float),
    "integer": int,
    "null": type(None),
}


def problems(schema, value, at="$"):
    """What JSON Schema, as far as these schemas use it, finds wrong with a value."""
    assert set(schema) <= {
        *(
            "$schema",
            "title",
            "description",
            "type",
            "properties",
            "required",
            "additionalProperties",
            "items",
        ),
        *("propertyNames", "minItems", "minProperties", "pattern", "enum", "anyOf"),
        *("minimum", "exclusiveMinimum", "maximum"),
    }
    if "type" in schema:
        right = isinstance(value, _TYPES[schema["type"]])
        if not right or (isinstance(value, bool) and schema["type"] != "boolean"):
            return [f"{at}: {value!r} is no {schema['type']}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{at}: {value!r} is not in {schema['enum']}"]
    if "pattern" in schema and not re.search(schema["pattern"], value):
        return [f"{at}: {value!r} does not match {schema['pattern']}"]
    if "anyOf" in schema and all(problems(one, value, at) for one in schema["anyOf"]):
        return [f"{at}: {value!r} is none of {schema['anyOf']}"]
    wrong = []
    if isinstance(value, (int, float)):
        low, above, high = (schema.get(key) for key in ("minimum", "exclusiveMinimum", "maximum"))
        out = (low is not None and value < low) or (above is not None and value <= above)
        if out or (high is not None and value > high):
            return [f"{at}: {value} is out of range"]
    if isinstance(value, list):
        wrong += [
            p for i, item in enumerate(value) for p in problems(schema.get("items", {}), item, f"{at}[{i}]")
        ]
        wrong += [f"{at}: too few"] * (len(value) < schema.get("minItems", 0))
    if isinstance(value, dict):
        wrong += [f"{at}: {key} is missing" for key in schema.get("required", ()) if key not in value]
        wrong += [f"{at}: too few"] * (len(value) < schema.get("minProperties", 0))
        for key, item in value.items():
            wrong += problems(schema.get("propertyNames", {}), key, f"{at}.{key}")
            more = schema.get("additionalProperties", {})
            part = schema.get("properties", {}).get(key, more)
            wrong += [f"{at}.{key}: unknown"] if part is False else problems(part, item, f"{at}.{key}")
    return wrong


def printed(*args):
    return CliRunner().invoke(main, ["schema", *args]).stdout


def test_the_files_are_what_the_command_prints():
    for name in schemas():
        text = (specs_dir() / "schema" / f"{name}.json").read_text(encoding="utf-8")
        assert text == printed(name), f"run: flashgen schema {name} > specs/schema/{name}.json"
    assert printed() == printed("spec")


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_shipped_specs_are_right(path):
    assert problems(schemas()["spec"], yaml.safe_load(path.read_text())) == []


@pytest.mark.parametrize("name", ["scores", "masks"])
def test_the_shipped_scores_and_masks_are_right(name):
    assert problems(schemas()[name], yaml.safe_load((specs_dir() / f"{name}.yaml").read_text())) == []


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("operator: attention", "operator: atention", "$.operator"),
        ("no_spills: true", "no_spils: true", "$.no_spils"),
        ("no_spills: true", "no_spills: 1", "$.no_spills"),
        ("min_arch: sm_90a", "min_arch: hopper", "$.targets.sm90.min_arch"),
        ("prefer: least_time", "prefer: cheapest", "$.dispatch.prefer"),
        ("schedule: persistent", "schedule: persitent", "$.steps[1].grid"),
        ("efficiency: 1.0}", "efficiency: -1.0}", "$.tiles["),
        ("stages: 3, ", "stages: {x: 3}, ", "$.tiles["),
        ("family: flash_fwd\n", "", "$"),
    ],
)
def test_a_wrong_spec_is_refused(old, new, where):
    text = (specs_dir() / "flash_fwd_sm90.yaml").read_text()
    assert old in text
    found = problems(schemas()["spec"], yaml.safe_load(text.replace(old, new, 1)))
    assert any(problem.startswith(where) for problem in found), found


def test_a_spec_that_extends_another_may_leave_keys_out():
    schema = schemas()["spec"]
    assert problems(schema, {"extends": "flash_fwd_sm80", "axes": {"head_dim": [64]}}) == []
    assert problems(schema, {"extends": "flash_fwd_sm80", "axis": {}}) != []


def test_every_pattern_is_one_of_javascript_as_well():
    """JavaScript has no \\A, \\Z and no named groups of Python."""
    text = json.dumps(schemas())
    assert not re.search(r"\\\\[AZ]|\(\?P", text)
