"""What the tests here share: inputs and truths, and the two forms of products."""

import sys
from pathlib import Path

import pytest

from pallas_kernels import backend

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(params=backend.PRODUCTS)
def products(request):
    """Kernels use this form of products, the portable one and Hopper's in turn."""
    with backend.products_by(request.param):
        yield request.param
