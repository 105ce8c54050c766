"""The lookout: whose signs are too old, and the one line about it."""

from bitmamba.io.peers import Peers
from bitmamba.train.lost import Lookout, lost_line


def make(tmp_path):
    lookout = Lookout(Peers(index=1, count=3), 15.0, tmp_path)
    lookout._signs = {i: ("", 0.0) for i in range(3)}
    return lookout


def missing(lookout, signs, now):
    lookout.see(signs, now)
    return lookout.missing(now)


def test_old_signs_are_missed_and_new_ones_are_not(tmp_path):
    lookout = make(tmp_path)

    assert missing(lookout, {0: "1 a", 1: "1 b", 2: "1 c"}, 10.0) is None
    assert missing(lookout, {0: "2 a", 1: "2 b", 2: "1 c"}, 20.0) is None
    assert missing(lookout, {0: "3 a", 1: "3 b", 2: "1 c"}, 25.5) == 2


def test_a_process_never_misses_itself_and_one_that_never_came_is_missed(tmp_path):
    lookout = make(tmp_path)

    assert missing(lookout, {0: "1 a", 2: "1 c"}, 14.0) is None
    assert missing(lookout, {0: "2 a"}, 16.0) is None
    assert missing(lookout, {0: "3 a"}, 30.0) == 2


def test_who_keeps_the_signs_is_missed_first_when_nobodys_are_seen(tmp_path):
    lookout = make(tmp_path)

    assert missing(lookout, {0: "1 a", 1: "1 b", 2: "1 c"}, 10.0) is None
    assert lookout.missing(25.5) == 0


def test_the_line_says_who_since_when_and_what_is_kept(tmp_path):
    assert "nothing was saved yet" in lost_line(1, 3, "is gone", workdir=tmp_path)
    (tmp_path / "checkpoints" / "40").mkdir(parents=True)
    line = lost_line(2, 3, "has given no sign", workdir=tmp_path, host="gpu07")

    assert line.startswith("error: process 2 of 3 (gpu07) has given no sign; ")
    assert "step 40 is saved" in line
