"""The choice of an implementation."""

import logging

from pallas_kernels import backend


def test_auto_takes_the_reference_and_says_so_once(caplog):
    backend._log_choice.cache_clear()

    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        chosen = [backend.resolve("auto", op="some_op") for _ in range(3)]
        backend.resolve("reference", op="some_op")

    assert chosen == ["reference"] * 3
    (record,) = caplog.records
    assert record.getMessage().startswith("some_op: implementation=auto runs reference")
