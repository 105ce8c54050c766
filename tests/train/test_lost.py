"""The lookout: whose signs are too old, and the one line about it."""

from bitmamba.io.peers import Peers
from bitmamba.train.lost import Lookout


def make(tmp_path):
    lookout = Lookout(Peers(index=0, count=3), 15.0, tmp_path)
    lookout._signs = {i: ("", 0.0) for i in range(3)}
    return lookout


def test_old_signs_are_missed_and_new_ones_are_not(tmp_path):
    lookout = make(tmp_path)

    assert lookout.missing({0: "1 a", 1: "1 b", 2: "1 c"}, 10.0) is None
    assert lookout.missing({0: "2 a", 1: "1 b", 2: "2 c"}, 20.0) is None
    assert lookout.missing({0: "3 a", 1: "1 b", 2: "3 c"}, 25.5) == 1


def test_a_process_never_misses_itself_and_one_that_never_came_is_missed(tmp_path):
    lookout = make(tmp_path)

    assert lookout.missing({1: "1 b", 2: "1 c"}, 14.0) is None
    assert lookout.missing({1: "2 b"}, 16.0) is None
    assert lookout.missing({}, 30.0) == 2


def test_the_line_says_who_since_when_and_what_is_kept(tmp_path):
    lookout = make(tmp_path)

    assert "nothing was saved yet" in lookout._line(1, "")
    (tmp_path / "checkpoints" / "40").mkdir(parents=True)
    line = lookout._line(2, "gpu07")

    assert line.startswith("error: process 2 of 3 (gpu07) has given no sign for 15 s")
    assert "step 40 is saved" in line
