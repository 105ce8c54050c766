"""One run at a time in a folder: two would delete each other's checkpoints."""

import contextlib
import os
import socket
import weakref
from collections.abc import Iterator
from pathlib import Path

from absl import logging

try:
    import fcntl
except ImportError:  # Windows has none: runs there are not kept apart
    fcntl = None

NAME = ".lock"
_MAX_OWNER = 200


class Lock:
    """The right to write a folder; the kernel takes it back when the process ends.

    Released by `release`, at the end of a `with`, or with the object.
    """

    def __init__(self) -> None:
        """Of nothing yet."""
        self._give_back = lambda: None

    def take(self, folder: str | Path, *, setting: str) -> None:
        """Make the folder if needed and take it; without locks there, only make it.

        Args:
            folder: where a run is going to write.
            setting: which setting or flag named it, for messages.

        Raises:
            ValueError: another process has it, or it cannot be made or written.
        """
        folder = Path(folder)
        made = not folder.exists()
        try:
            if not made and not folder.is_dir():
                raise NotADirectoryError(0, "not a folder")
            folder.mkdir(parents=True, exist_ok=True)
            if fcntl is None:
                return
            fd = _open_locked(folder / NAME)
        except BlockingIOError:
            raise ValueError(
                f"{setting}: got {folder}, where another run trains now "
                f"({_owner(folder / NAME)}); expected one of its own; wait, stop that "
                f"one, or set {setting}"
            ) from None
        except OSError as error:
            raise ValueError(
                f"{setting}: got {folder} ({error.strerror or error}); expected a "
                f"folder that can be made and written; set {setting}"
            ) from None
        self._give_back = weakref.finalize(
            self, _give_back, fd, folder, made=made, pid=os.getpid()
        )

    def release(self) -> None:
        """Let others in; a folder that was made for nothing goes with it."""
        self._give_back()

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *_) -> None:
        self.release()

    @contextlib.contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Keep it past a block, unless the block fails."""
        try:
            yield
        except BaseException:
            self.release()
            raise


def _open_locked(path: Path) -> int:
    """A descriptor that holds the lock; BlockingIOError if another one does."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            _lock(fd, path)
            if _is_there(fd, path):
                _sign(fd)
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _sign(fd: int) -> None:
    """Say whose it is, for the message; on a full disk it stays unsaid."""
    mine = f"pid {os.getpid()} on {socket.gethostname()}"
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.write(fd, mine.encode())


def _is_there(fd: int, path: Path) -> bool:
    """False if its last owner removed the file after we had opened it."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:  # some network file systems have no locks
        logging.warning(
            "%s: no lock (%s); see that no other run writes there", path, error.strerror
        )


def _owner(path: Path) -> str:
    said = ""
    with contextlib.suppress(OSError), path.open(errors="replace") as file:
        said = file.read(_MAX_OWNER)
    return said or "of an unknown pid"


def _give_back(fd: int, folder: Path, *, made: bool, pid: int) -> None:
    if os.getpid() == pid:  # a forked child must not remove its parent's
        with contextlib.suppress(OSError):
            (folder / NAME).unlink()
            if made:
                folder.rmdir()  # unless something is in it
    os.close(fd)
