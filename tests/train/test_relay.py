"""The relay to process 0: bytes both ways, and the word when nobody is there."""

import queue
import socket

import pytest

from bitmamba.train.relay import Relay


@pytest.fixture
def process_0():
    """A listener where process 0 would be."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        yield server


@pytest.fixture
def relay(process_0):
    """A relay to it."""
    host, port = process_0.getsockname()
    relay = Relay(f"{host}:{port}")
    yield relay
    relay.part()


def joined(relay, process_0):
    """Both ends of a connection through the relay."""
    host, port = relay.address.split(":")
    near = socket.create_connection((host, int(port)), timeout=10)
    far, _ = process_0.accept()
    far.settimeout(10)
    return near, far


def test_bytes_pass_both_ways(relay, process_0):
    near, far = joined(relay, process_0)
    with near, far:
        near.sendall(b"to 0")
        assert far.recv(16) == b"to 0"
        far.sendall(b"from 0")
        assert near.recv(16) == b"from 0"

        near.close()  # JAX has parted
        assert far.recv(16) == b""


def test_process_0_that_is_gone_is_told_while_jax_still_waits(relay, process_0):
    near, far = joined(relay, process_0)
    near.settimeout(0.0)
    seen = queue.Queue()

    def lost():
        with pytest.raises(BlockingIOError):  # open, and nothing to read
            near.recv(16)
        seen.put("open")

    relay.watch(lost)
    with near:
        far.close()

        assert seen.get(timeout=10) == "open"


def test_while_all_still_meet_a_connection_that_ends_is_made_anew(relay, process_0):
    near, far = joined(relay, process_0)
    far.close()
    with near:
        assert near.recv(16) == b""
    near, far = joined(relay, process_0)
    with near, far:
        far.sendall(b"again")
        assert near.recv(16) == b"again"


def test_once_the_run_is_over_process_0_may_go(relay, process_0):
    told = []
    relay.watch(lambda: told.append(1))
    near, far = joined(relay, process_0)
    with near:
        relay.part()
        far.close()

        assert near.recv(16) == b""
    assert not told
