"""Programs compiled for a GPU that is not here. Needs the extra `gpucheck`.

One GPU for all tests: Mosaic compiles for one generation in a process.
"""

from pathlib import Path

import pytest

from pallas_kernels import absent_gpu

TARGETS = Path(__file__).resolve().parents[3] / "scripts" / "gpu_targets"


def pytest_collection_modifyitems(items):
    if lacking := absent_gpu.missing():
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=lacking))


@pytest.fixture(scope="session")
def rtx3060():
    return absent_gpu.absent_gpu((TARGETS / "rtx3060.txtpb").read_text())


@pytest.fixture(scope="session")
def two_rtx3060():
    config = (TARGETS / "rtx3060.txtpb").read_text()
    return absent_gpu.absent_gpu(config, n_devices=2)
