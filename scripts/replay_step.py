"""Run the step that a bundle holds again, and name where its numbers went bad.

    python scripts/replay_step.py BUNDLE

BUNDLE is a folder <workdir>/bundles/step_<number>, left by a run that ended with exit
code 3. Every operation of the step (loss, gradients, update) is run in float32 and in
float64 side by side; the first whose result is not finite, or unlike in the two, and
reaches the loss, a gradient or the update, is named with its layer, token and cause.
It is slow: some seconds for a small model.

Exit codes: 0 found nothing, 3 found something, 2 no readable bundle there.
"""

import json
import sys
from pathlib import Path

from absl import flags

from bitmamba import command_line


def show(path: str) -> int:
    """Read, replay, print; the exit code."""
    # These load JAX, after the path is checked.
    from bitmamba.train import bundle, causes, replay

    found = bundle.read(path)
    info = found.info
    print(f"bundle of step {info['step']}, which was bad: {info['cause']}")
    versions = ", ".join(f"{k} {v}" for k, v in info["versions"].items())
    print(f"made with {versions}; learning rate x {info['lr_scale']:g}")
    finding = replay.replay(found)
    if finding is None:
        print("nothing found: all is finite, and alike in float32 and float64")
        if (cause := causes.absurd_rate(found)) is None:
            return command_line.DONE
        print(f"likely cause: {cause}")
        return command_line.BAD_NUMBERS
    for line in lines(finding, found):
        print(line)
    for line in about_token(finding, found, Path(path)):
        print(line)
    print(f"likely cause: {finding.cause}")
    return command_line.BAD_NUMBERS


def lines(finding, found) -> list[str]:
    """What was found, without its cause."""
    more = f" and {len(finding.bad) - 1} more" if len(finding.bad) > 1 else ""
    counts = ", ".join(f"{n} in {lane}" for lane, n in finding.lanes.items())
    told = [f"bad: {finding.bad[0]}{more}; results not finite: {counts}"]
    if finding.origin is None:
        return [*told, f"first: {finding.parameter}, an input of the step"]
    origin = finding.origin
    what = f"not finite in {' and '.join(origin.bad)}" if origin.bad else "unlike"
    inputs = ", ".join(f"{x:.6g}" for x in origin.largest)
    return [
        *told,
        f"first operation: {origin.primitive} ({finding.kind}), {what}",
        f"layer: {finding.layer}",
        f"at: {origin.source or 'an operation of JAX'}",
        f"largest inputs: {inputs}; first bad element {origin.index} of {origin.shape}",
    ]


def about_token(finding, found, folder: Path) -> list[str]:
    """The token that it shows at first, and its document."""
    if finding.token is None:
        return ["token: this operation is not of a token"]
    micro, row, position = finding.token
    token = int(found.batch.tokens[micro, row, position])
    told = [f"token: id {token} at position {position} of row {row}, batch {micro}"]
    text = (folder / "documents.jsonl").read_text(encoding="utf-8")
    for document in map(json.loads, text.splitlines()):
        inside = 0 <= position - document["first"] < document["tokens"]
        if (document["micro"], document["row"]) == (micro, row) and inside:
            start = " ".join(document["text"].split())[:160]
            told.append(f"in a document of {document['category']}: {start!r}")
    return told


def main() -> int:
    """Read the command line and do what it says."""
    try:
        left = flags.FLAGS(sys.argv)[1:]
    except flags.Error as error:
        raise ValueError(str(error).splitlines()[0]) from None
    if len(left) != 1 or not Path(left[0]).is_dir():
        raise ValueError(
            f"replay_step: got {' '.join(left) or 'nothing'}; expected one folder "
            "<workdir>/bundles/step_<number> that a stopped run left"
        )
    return show(left[0])


if __name__ == "__main__":
    with command_line.quiet_ends(), command_line.one_line_mistakes():
        sys.exit(main())
