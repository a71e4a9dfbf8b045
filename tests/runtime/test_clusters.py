"""Clusters that a device has no room for, with the driver made up."""

import ctypes
import logging

import pytest

import flashgen
from fake_gpu import H200, array
from flashgen.errors import DeviceTypeNotSupported
from flashgen.families.load import load_specs
from flashgen.runtime import clusters, kernel
from flashgen.runtime.dependent import LaunchConfig

pytest.importorskip("cupy")


@pytest.fixture
def variant():
    (spec,) = (spec for spec in load_specs() if spec.name == "flash_decode_sm90")
    of_point = spec.select(head_dim=64, dtype="fp16", mask_type="none", gqa="mha")
    return next(variant for variant in of_point if variant.tile_name == "c16")


class Occupancy:
    """``cuOccupancyMaxActiveClusters`` that answers ``count``, or fails with ``status``."""

    def __init__(self, monkeypatch, count, status=0):
        self.count, self.status, self.asked = count, status, []
        monkeypatch.setattr(clusters, "driver_function", lambda: self)

    def __call__(self, count, function, config):
        one = ctypes.cast(config, ctypes.POINTER(LaunchConfig)).contents
        shape = (*one.grid, *one.block, one.shared_bytes, one.stream, one.num_attributes)
        self.asked.append((function.value, shape))
        ctypes.cast(count, ctypes.POINTER(ctypes.c_int)).contents.value = self.count
        return self.status


def test_the_driver_is_asked_about_one_cluster(variant, monkeypatch):
    occupancy = Occupancy(monkeypatch, 1)
    clusters.check(variant, 4001, H200)
    shape = (16, 1, 1, variant.threads, 1, 1, variant.smem_bytes, None, 0)
    assert occupancy.asked == [(4001, shape)]


def test_no_room_is_an_error_that_names_what_is_needed(variant, monkeypatch):
    Occupancy(monkeypatch, 0)
    needed = rf"{variant.name} runs in clusters of 16 .* {variant.smem_bytes} bytes .*H200.* no room"
    with pytest.raises(DeviceTypeNotSupported, match=needed):
        clusters.check(variant, 4001, H200)


def test_a_driver_that_does_not_answer_is_an_error(variant, monkeypatch):
    from cupy_backends.cuda.api import driver

    def check_status(status):
        raise RuntimeError(f"refused with {status}")

    monkeypatch.setattr(driver, "check_status", check_status)
    Occupancy(monkeypatch, 1, status=719)
    with pytest.raises(RuntimeError, match="refused with 719"):
        clusters.check(variant, 4001, H200)


@pytest.mark.parametrize(
    ("most", "spec"), [(16, "flash_decode_sm90"), (8, "flash_decode_sm90"), (1, "flash_decode_sm80")]
)
def test_a_call_takes_the_best_kernel_whose_clusters_fit(most, spec, fake_gpu, monkeypatch, caplog):
    """Down to one without clusters; each that does not fit is logged."""
    load = kernel.load

    def fitting(variant, device):
        if variant.grid.cluster > most:
            raise clusters.NoRoomForClusters(f"no room for {variant}")
        return load(variant, device)

    monkeypatch.setattr(kernel, "load", fitting)
    q, out = (array((1, 1, 4, 128), address=address) for address in (1 << 40, 1 << 41))
    k, v = (array((1, 4096, 1, 128), address=address) for address in (1 << 42, 1 << 43))
    with caplog.at_level(logging.INFO, logger="flashgen"):
        plan = flashgen.plan(q, k, v, out=out)
    assert (plan.variant.spec, plan.variant.grid.cluster) == (spec, most)
    assert ("no room for" in caplog.text) == (most < 16)
