"""What tells content from all other content."""

from __future__ import annotations

import hashlib
from pathlib import Path


def hash_of(content: Path | bytes) -> str:
    """What tells a file, or bytes, from all others."""
    if isinstance(content, bytes):
        return hashlib.blake2b(content, digest_size=16).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
