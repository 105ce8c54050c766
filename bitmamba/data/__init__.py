"""Rows to packed windows; README.md has the path and the decisions."""

from bitmamba.data.build import DataBundle, build_data
from bitmamba.data.formats import FORMATS
from bitmamba.data.token_cache import TokenCache
from bitmamba.data.token_file import DamagedTokensError
from bitmamba.data.windows import rows_of_process

__all__ = [
    "FORMATS",
    "DamagedTokensError",
    "DataBundle",
    "TokenCache",
    "build_data",
    "rows_of_process",
]
