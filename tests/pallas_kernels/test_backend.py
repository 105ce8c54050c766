"""The choice of an implementation."""

import logging

import jax
import pytest

from pallas_kernels import backend, compat


@pytest.fixture
def device(monkeypatch):
    """Stands in for the device and the JAX version that `resolve` asks for."""

    def make(platform, capability=None, *, has_mosaic=True):
        monkeypatch.setattr(backend, "platform", lambda: platform)
        monkeypatch.setattr(backend, "capability", lambda: capability)
        monkeypatch.setattr(compat, "HAS_MOSAIC_GPU", has_mosaic)
        backend.log_choice.cache_clear()

    return make


def test_auto_takes_the_reference_and_says_so_once(caplog):
    backend.log_choice.cache_clear()

    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        chosen = [backend.resolve("auto", op="some_op") for _ in range(3)]
        backend.resolve("reference", op="some_op")

    assert chosen == ["reference"] * 3
    (record,) = caplog.records
    assert record.getMessage().startswith("some_op: implementation=auto runs reference")


def test_auto_takes_the_kernel_only_on_a_gpu_where_it_wins(device):
    def auto(**more):
        return backend.resolve("auto", op="some_op", has_kernel=True, **more)

    device("gpu", (8, 6))
    assert auto(wins=True) == "pallas"
    assert auto(wins=False) == "reference"
    assert auto(wins=True, refusal="x: got float64; expected bfloat16") == "reference"
    device("gpu", (7, 5))
    assert auto(wins=True) == "reference"
    device("cpu")
    assert auto(wins=True) == "reference"
    device("gpu", (9, 0), has_mosaic=False)
    assert auto(wins=True) == "reference"


def test_pallas_runs_on_a_gpu_and_is_interpreted_on_a_cpu(device, caplog):
    device("gpu", (8, 0))
    assert backend.resolve("pallas", op="some_op", has_kernel=True) == "pallas"

    device("cpu")
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        assert backend.resolve("pallas", op="some_op", has_kernel=True) == "pallas"
    assert "interpreted: slow, for checking only" in caplog.text


@pytest.mark.parametrize(
    ("where", "more", "said"),
    [
        (("gpu", (8, 6)), {"has_kernel": False}, "no Pallas kernel for some_op on"),
        (("gpu", (7, 5)), {}, "NVIDIA GPU of sm_80 or later"),
        (("tpu", None), {}, "does not run on platform 'tpu'"),
        (("gpu", (8, 6)), {"refusal": "x: got float64"}, "x: got float64"),
    ],
)
def test_pallas_names_what_is_missing(device, where, more, said):
    device(*where)

    with pytest.raises(NotImplementedError, match=said):
        backend.resolve("pallas", op="some_op", **{"has_kernel": True} | more)


def test_pallas_does_not_run_where_numbers_are_wide(device):
    device("gpu", (8, 6))

    refused = pytest.raises(NotImplementedError, match="jax_enable_x64 is on")
    with jax.enable_x64(True), refused:
        backend.resolve("pallas", op="some_op", has_kernel=True)


def test_pallas_names_the_jax_it_needs(device):
    device("cpu", has_mosaic=False)

    with pytest.raises(NotImplementedError, match=r"needs JAX 0\.11 or later"):
        backend.resolve("pallas", op="some_op", has_kernel=True)


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="got 'triton'; expected one of 'auto'"):
        backend.resolve("triton", op="some_op")


@pytest.mark.parametrize(
    ("capability", "found"),
    [
        ((8, 6), "mma"),
        ((9, 0), "wgmma"),
        ((10, 0), "mma"),
        ((12, 0), "mma"),
        (None, "mma"),
    ],
)
def test_products_by_generation(monkeypatch, capability, found):
    monkeypatch.setattr(backend, "capability", lambda: capability)

    assert backend.products() == found
    with backend.products_by("wgmma"):
        with backend.products_by("mma"):
            assert backend.products() == "mma"
        assert backend.products() == "wgmma"
    assert backend.products() == found


def test_unknown_products_are_refused():
    refused = pytest.raises(ValueError, match="got 'tcgen05'; expected one of 'mma'")
    with refused, backend.products_by("tcgen05"):
        pass
