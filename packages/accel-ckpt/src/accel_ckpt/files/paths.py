"""Names of files that come out of a file: they stay inside their folder, and name plain files."""

from __future__ import annotations

import stat
from pathlib import Path, PurePosixPath, PureWindowsPath

from accel_ckpt.errors import CorruptCheckpointError
from accel_ckpt.files.digests import plain_file


def is_inside(name: str) -> bool:
    """Return whether the name of a file stays inside its folder, on every system.

    Args:
        name: The name, with forward slashes.

    Returns:
        False if it is absolute, has "..", a backslash or a drive letter, or is not spelled plainly.
    """
    # Compared with its normal form, so that "a//b", "./a" and "a/" have no second spelling.
    parts = PurePosixPath(str(name)).parts
    plain = bool(parts) and PurePosixPath(*parts).as_posix() == name
    if not plain or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        return False
    # "C:x" is one part for POSIX and a drive for Windows, where checkpoints may be read too.
    return not any(PureWindowsPath(part).drive for part in parts)


def check_inside(name: str, source: Path) -> None:
    """Check that a name does not lead out of the folder which it is meant to be in.

    Args:
        name: The name, with forward slashes.
        source: The file that it comes from, for the message.

    Raises:
        CorruptCheckpointError: If it does; see `is_inside`.
    """
    if not is_inside(name):
        raise CorruptCheckpointError(
            f"{source} names the file {name!r}, which is not inside its folder. Do not use it."
        )


def listed_file(folder: Path, name: str, source: Path) -> Path:
    """Find a file that an index of weights names.

    Args:
        folder: The folder of the index.
        name: The file's path inside the folder.
        source: The index, for messages.

    Returns:
        The file's path.

    Raises:
        CorruptCheckpointError: If the name leads out of the folder, or it is a link or a special file. Links
            into the `blobs` folder of a hub's download cache, where its snapshots keep their files, are
            followed.
        FileNotFoundError: If it is not there.
    """
    check_inside(name, source)
    path = folder / name
    # Before plain_file, which takes no link at all.
    if path.is_symlink() and _is_blob(folder, path.resolve()):
        return path
    try:
        return plain_file(folder, name)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{source} names {name}, and {folder} has no such file. Copy the folder anew."
        ) from error
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(
            f"{source}: {error}. Put the file itself there, if you trust it."
        ) from error


def _is_blob(folder: Path, target: Path) -> bool:
    """Whether a link stays in the cache: snapshots/<revision>/<file> points to blobs/<hash> beside."""
    snapshot = folder.resolve()
    if snapshot.parent.name != "snapshots" or target.parent != snapshot.parent.parent / "blobs":
        return False
    return target.exists() and stat.S_ISREG(target.stat().st_mode)
