"""How a run leaves: what it says after a stop, and its last saves and rows."""

from typing import Any

from rich.console import Console

from bitmamba.io.checkpoint import Checkpointer


def last_words(checkpointer: Checkpointer, saved: int | None) -> str:
    """What is on the disk when a run was told to stop; waits for the save.

    Args:
        saved: the step whose save was started for it; None if nothing was new.
    """
    told = checkpointer.wait()
    good = checkpointer.last_good()
    if not told and saved is None:
        told = "nothing was saved yet" if good is None else f"step {good} is saved"
        told += "; the same command goes on"
    return told or f"saved step {saved}; the same command goes on from there"


def close_all(console: Console, *parts: Any) -> bool:
    """Close what writes files; tells what could not be written. Whether all could."""
    is_whole = True
    for part in parts:
        try:
            part.close()
        except OSError as error:
            console.print(f"[red]error: {error}")
            is_whole = False
    return is_whole
