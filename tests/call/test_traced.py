"""What torch.compile reads while it traces flashgen: no dictionary that other code may change meanwhile."""

import ast
import importlib
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_compiled import CALLS, ROWS, given

import flashgen
from flashgen.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flashgen.host import torchimport

torch = pytest.importorskip("torch")
from torch.nn.attention.bias import causal_lower_right  # noqa: E402

from flashgen.compat.torch import scaled_dot_product_attention  # noqa: E402

PACKAGE = Path(flashgen.__file__).parent
# Where the package reads sys.modules: while something is imported, or an operator looked up; in no call.
AT_IMPORT = {
    "host/libraryimport.py": {"after_import", "find_spec", "exec_module"},
    "host/torchimport.py": {"_imported", "__getattr__"},
    "runtime/arrays.py": {"know_tensors"},
}


def drop_ins(x):
    q, k, v = x["q"], *x["new"].unbind()
    sdpa = [y.transpose(1, 2) for y in (q, k, v)]
    odd = [y[..., :13] for y in sdpa]
    options = {"causal": True, "alibi_slopes": x["slopes"]}
    lengths = x["lengths"].clamp(max=8)
    cache = x["kv"][:3].unbind(1)
    return (
        scaled_dot_product_attention(*sdpa, is_causal=True, enable_gqa=True),
        scaled_dot_product_attention(*sdpa, scale=1 / math.sqrt(q.size(-1)), enable_gqa=True),
        scaled_dot_product_attention(*odd, torch.ones(3, 3, dtype=torch.bool), enable_gqa=True),
        flash_attn_func(q, k, v, **options),
        flash_attn_varlen_func(*(y.flatten(0, 1) for y in (q, k, v)), x["cu"], x["cu"], 5, 5, **options),
        flash_attn_with_kvcache(q, *cache, cache_seqlens=lengths, causal=True),
        flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=2),
    )


BIAS = causal_lower_right(ROWS, ROWS)


def with_causal_bias(x):
    q = x["q"].transpose(1, 2)
    return scaled_dot_product_attention(q, q, q, BIAS)


WRITES = (".setdefault", ".update", ".pop", ".clear")


def growing():
    """The dictionaries of modules that functions of the package write to, as pairs of module and name."""
    found = {("sys", "modules"), ("os", "environ")}
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        tops = {
            target.id
            for node in tree.body
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, (ast.Dict, ast.Call))
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    written = None
                    if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
                        written = node.value
                    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(WRITES):
                        written = node.func.value
                    if isinstance(written, ast.Name) and written.id in tops:
                        found.add((path.stem, written.id))
    return found


def test_the_dictionaries_that_grow_are_found():
    assert growing() >= {("arrays", "_KINDS"), ("parts", "_sound")}


@pytest.mark.parametrize("call", [*CALLS, drop_ins, with_causal_bias])
def test_no_dictionary_that_grows_is_guarded(call):
    names = {name for _, name in growing()}
    torch.compiler.reset()
    found = torch._dynamo.explain(call)(given())
    assert found.out_guards
    assert not found.graph_break_count
    for guard in found.out_guards:
        assert not names & set(re.findall(r"\w+", guard.name)), guard.name


def test_only_imports_read_sys_modules():
    for path in PACKAGE.rglob("*.py"):
        allowed = AT_IMPORT.get(str(path.relative_to(PACKAGE)), set())
        tree = ast.parse(path.read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.modules", "sys.meta_path"):
                inside = {f.name for f in functions if f.lineno <= node.lineno <= f.end_lineno}
                assert inside & allowed, f"{path}:{node.lineno}"


def test_the_sum_of_two_calls_is_one_dynamic_graph():
    def both(q, k, v):
        scaled = scaled_dot_product_attention(q, k, v, scale=1 / math.sqrt(q.size(-1)))
        return scaled_dot_product_attention(q, k, v, is_causal=True) + scaled

    torch.compiler.reset()
    q, k, v = (torch.randn(2, 3, 8, 16) for _ in "qkv")
    graph = torch.compile(both, dynamic=True, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(graph(q, k, v), both(q, k, v), rtol=0, atol=0)


LOADING = """
import sys
{imports}
rooms = {{name for name in sys.modules if name.startswith("flashgen.")}}
assert rooms == {{f"flashgen.{{x}}" for x in ("host", "host.libraryimport", "host.torchimport")}}, rooms
found = torch.export.load({path!r}).module()(*torch.load({inputs!r}))
assert torch.equal(found, torch.load({result!r}))
q = torch.randn(1, 4, 2, 16)
graph = torch.compile(lambda q: flashgen.attention(q, q, q), fullgraph=True, backend="eager")
assert graph(q).shape == q.shape
assert "torch" not in [getattr(finder, "library", "") for finder in sys.meta_path]
"""


@pytest.mark.parametrize("imports", ["import flashgen, torch", "import torch, flashgen"])
def test_import_flashgen_is_enough_to_load_an_exported_program(imports, tmp_path):
    class Model(torch.nn.Module):
        def forward(self, q):
            out, lse = flashgen.attention(q, q, q, causal=True, return_lse=True)
            return flashgen.merge([(out, lse), (out, lse)])[0]

    q = torch.randn(2, 5, 4, 16)
    files = {name: str(tmp_path / f"{name}.pt2") for name in ("path", "inputs", "result")}
    torch.export.save(torch.export.export(Model(), (q,)), files["path"])
    torch.save((q,), files["inputs"])
    torch.save(Model()(q), files["result"])
    code = LOADING.format(imports=imports, **files)
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_each_operator_has_a_module_that_registers_it():
    for module in torchimport.OPERATORS.values():
        importlib.import_module(module)
    names = {
        name.partition("::")[2]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("flashgen::")
    }
    assert names == torchimport.OPERATORS.keys()


def test_a_search_for_pytorch_does_not_end_the_wait_for_its_import():
    code = (
        "import sys, flashgen, importlib.util\n"
        "assert importlib.util.find_spec('torch') is not None\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "assert type(torch.ops.flashgen).__name__ == 'Operators'\n"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
