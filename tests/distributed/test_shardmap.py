"""Attention over the devices of a JAX mesh beside one device: four devices that the CPU pretends to have."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, jax.numpy as jnp, numpy as np, flashgen
from flashgen.distributed.shardmap import attention, token_order
from jax.sharding import AxisType, PartitionSpec as P

mesh = jax.make_mesh((4,), ("cp",), axis_types=(AxisType.Auto,))
spec = P(None, "cp")
random = np.random.default_rng(0)

def arrays(dtype=jnp.float32):
    return [jnp.asarray(random.standard_normal((2, 64, heads, 16)), dtype) for heads in (4, 2, 2, 4)]

def inside(**options):
    call = lambda *x: attention(*x, axis_name="cp", **options)
    out_specs = (spec, P(None, None, "cp")) if options.get("return_lse") else spec
    return jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=out_specs)

results = {"errors": {}}
for layout, options in (
    ("zigzag", {}),
    ("zigzag", {"causal": True, "softcap": 2.0}),
    ("zigzag", {"window_size": (9, 0), "softmax_scale": 0.5}),
    ("contiguous", {"causal": True}),
):
    order = token_order(64, 4, layout)
    *qkv, dout = arrays()
    dlse = jnp.asarray(random.standard_normal((2, 4, 64)), jnp.float32)
    function = inside(layout=layout, return_lse=True, **options)

    def sharded(*x):
        out, lse = function(*(y[:, order] for y in x))
        return (out * dout[:, order]).sum() + (lse * dlse[:, :, order]).sum(), (out, lse)

    def alone(*x):
        out, lse = flashgen.attention(*x, return_lse=True, **options)
        return (out * dout).sum() + (lse * dlse).sum(), (out[:, order], lse[:, :, order])

    gradients, values = jax.jit(jax.grad(sharded, (0, 1, 2), has_aux=True))(*qkv)
    expected = jax.grad(alone, (0, 1, 2), has_aux=True)(*qkv)
    pairs = zip((*gradients, *values), (*expected[0], *expected[1]), strict=True)
    errors = [float(abs(np.asarray(x) - np.asarray(y)).max()) for x, y in pairs]
    results["errors"][f"{layout} {options}"] = max(errors)

*qkv, dout = arrays(jnp.bfloat16)
loss = lambda *x: (inside(causal=True)(*x) * dout).astype(jnp.float32).sum()
program = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*qkv))
sums = [line for line in program.splitlines() if "= reduce_scatter" in line]
results["sums"] = [line.split(":")[1] for line in sums]

# dv is rounded once: half a step of bfloat16 from the sum in float64, but for what cancels in fp32.
gradient = jax.jit(jax.grad(loss, 2))(*(x[:, token_order(64, 4)] for x in qkv))
wide = [np.asarray(x, np.float64) for x in qkv]
scores = np.einsum("bqhd,bkhd->bhqk", wide[0], wide[1].repeat(2, 2)) / 4
scores = np.where(np.tri(64, dtype=bool), scores, -np.inf)
p = np.exp(scores - scores.max(-1, keepdims=True))
p /= p.sum(-1, keepdims=True)
back = np.argsort(token_order(64, 4))
right = np.einsum("bhqk,bqhd->bkhd", p, np.asarray(dout, np.float64)[:, back])
right = right.reshape(2, 64, 2, 2, 16).sum(3)[:, token_order(64, 4)]
error = abs(np.asarray(gradient, np.float64) - right) - 1e-5 * abs(right).mean()
results["rounded"] = float((error / 2.0 ** (np.floor(np.log2(abs(right))) - 8)).max())
results["refused"] = []
for options, tokens in (
    ({"window_size": (3, 2)}, 64),
    ({"window_size": (3, -1)}, 64),
    ({"layout": "documents"}, 64),
    ({}, 60),
):
    try:
        inside(**options)(*(x[:, :tokens] for x in qkv))
    except flashgen.FlashgenError as error:
        results["refused"].append(f"{type(error).__name__}: {error}")
try:
    token_order(60, 4)
except flashgen.BadParam as error:
    results["refused"].append(str(error))
print(json.dumps(results))
"""


def test_four_devices_give_what_one_gives():
    pytest.importorskip("jax")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results["errors"]) == 4
    assert max(results["errors"].values()) < 1e-5
    assert len(results["sums"]) == 2
    assert results["rounded"] < 1.02
    assert all(kind.startswith("f32[") for kind in results["sums"])
    for message, start in zip(
        results["refused"],
        (
            "BadParam: window_size is (3, 2); inside jax.shard_map a window is causal",
            "BadParam: window_size is (3, -1); inside",
            "BadParam: layout is 'documents'; expected 'contiguous' or 'zigzag'",
            "BadTensorShape: q has 15 tokens; layout 'zigzag' needs an even number",
            "tokens is 60; layout 'zigzag' over 4 devices needs a multiple of 8",
        ),
        strict=True,
    ):
        assert message.startswith(start)
