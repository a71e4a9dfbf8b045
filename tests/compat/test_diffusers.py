"""Transformers of diffusers through PyTorch's registry, on the CPU: their native backend is SDPA."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from torch.nn import attention as registry  # noqa: E402

from flashgen.compat.torch import register  # noqa: E402

if not hasattr(registry, "register_flash_attention_impl"):
    pytest.skip("PyTorch 2.11 and later have the registry", allow_module_level=True)

from flashgen.compat import torch_operators  # noqa: E402

pytestmark = pytest.mark.extra


def test_a_tiny_flux_pipeline_runs_flashgen(monkeypatch):
    """Two steps of denoising: the transformer, and the scheduler of a pipeline."""
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    ).eval()
    latents, prompt, pooled = torch.randn(1, 16, 4), torch.randn(1, 8, 32), torch.randn(1, 32)
    places = {"img_ids": torch.randn(16, 3), "txt_ids": torch.zeros(8, 3)}

    @torch.no_grad()
    def denoise():
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
        scheduler.set_timesteps(2)
        x = latents
        for step in scheduler.timesteps:
            noise = model(
                hidden_states=x,
                encoder_hidden_states=prompt,
                pooled_projections=pooled,
                timestep=step.expand(1) / 1000,
                **places,
            ).sample
            x = scheduler.step(noise, step, x).prev_sample
        return x

    right = denoise()
    calls = []
    attend = torch_operators.attention_of_any_width
    monkeypatch.setattr(
        torch_operators, "attention_of_any_width", lambda *a, **o: calls.append(a[0].shape) or attend(*a, **o)
    )
    register(cpu=True)
    registry.activate_flash_attention_impl("flashgen")
    try:
        found = denoise()
    finally:
        registry.restore_flash_attention_impl()
    assert len(calls) == 4  # two layers, two steps
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
