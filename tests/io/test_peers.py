"""Processes agree through a store; here threads and a dict stand in for both."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from bitmamba.io.peers import ALONE, Peers


class Store:
    """The calls of JAX's client that `Peers` uses."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            assert allow_overwrite or key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, timeout_ms):
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, 10)
            return self.values[key]

    def key_value_delete(self, key):
        with self.changed:
            del self.values[key]

    def wait_at_barrier(self, name, timeout_ms):
        with self.changed:
            self.values[name] = self.values.get(name, 0) + 1
            self.changed.notify_all()
            here = self.changed.wait_for(
                lambda: self.values[name] == 2, timeout_ms / 1000
            )
        if not here:
            raise TimeoutError

    def key_value_dir_get(self, prefix):
        return [(k, v) for k, v in self.values.items() if k.startswith(prefix)]


def on_all(count, what):
    """What `what(peers)` returns in each of some processes, and their store."""
    store = Store()

    def one(index):
        return what(Peers(store, index=index, count=count))

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count))), store


def test_all_hear_the_same_in_every_round():
    def talk(peers):
        time.sleep(0.01 * peers.index)
        return [
            peers.gather({"from": peers.index}),
            peers.first(lambda: ["only", peers.index]),
            peers.all(peers.index != 1),
            peers.all(True),
        ]

    said, store = on_all(3, talk)

    assert said[0] == said[1] == said[2]
    assert said[0] == [[{"from": i} for i in range(3)], ["only", 0], False, True]
    # What everybody has read does not pile up.
    assert len(store.values) == 3


def test_only_the_first_acts():
    acted = []

    on_all(2, lambda peers: peers.do_first(lambda: acted.append(peers.index)))

    assert acted == [0]


def test_signs_are_by_process_and_the_last():
    def sign(peers):
        peers.give_sign("1")
        peers.give_sign(f"2 of {peers.index}")
        return peers

    peers, _ = on_all(2, sign)

    assert peers[0].signs() == {0: "2 of 0", 1: "2 of 1"}


def test_who_meets_nobody_learns_it():
    assert on_all(2, lambda peers: peers.meet(10.0))[0] == [True, True]
    assert not Peers(Store(), index=0, count=2).meet(0.05)


def test_alone_there_is_nobody_to_ask():
    assert ALONE.gather(1) == [1]
    assert ALONE.first(lambda: 2) == 2
    assert ALONE.all(True)
    assert ALONE.is_first
