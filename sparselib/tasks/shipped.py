"""The files of data/corpora that are in the repository. Each is compared with its SHA-256 before it is used."""

from __future__ import annotations

import hashlib
import json

from ..paths import corpora_dir

RESTORE = "bring the shipped files back with `git checkout -- data/corpora`"


def shipped_checksum(file: str) -> str:
    """SHA-256 (hex) that ``file`` must have, from checksums.json. Errors: as :func:`shipped_bytes`."""
    listing = corpora_dir() / "checksums.json"
    try:
        return json.loads(listing.read_text("utf-8"))[file]
    except FileNotFoundError:
        raise FileNotFoundError(f"{listing} is missing: {RESTORE}") from None
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f"{listing} holds no checksum of {file}: {RESTORE}") from None


def shipped_bytes(file: str) -> bytes:
    """What is in ``file``.

    Errors: FileNotFoundError for a missing file, ValueError for one that is not as shipped; both name it and say how
    to get it back.
    """
    expected = shipped_checksum(file)
    path = corpora_dir() / file
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {RESTORE}")
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise ValueError(f"{path} was altered: its SHA-256 is {found}, not {expected}; {RESTORE}")
    return content
