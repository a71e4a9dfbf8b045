"""An entry of the disk cache, or of a bundle, as bytes: a magic number, the SHA-256 of what follows, the
key, the payload.
"""

from __future__ import annotations

import hashlib

_MAGIC = b"flashgen-cache-1\n"
_DIGEST_END = len(_MAGIC) + 32
_KEY_END = _DIGEST_END + 32
BEGIN_BYTES = len(_MAGIC)
# The most bytes of an entry: a kernel has some 100,000, a library of the simulator some 2,000,000.
MAX_BYTES = 1 << 26


def pack(key: str, payload: bytes) -> bytes:
    """The bytes of an entry."""
    body = bytes.fromhex(key) + payload
    return _MAGIC + hashlib.sha256(body).digest() + body


def unpack(data: bytes, key: str) -> bytes | None:
    """The payload, or None if ``data`` is not an intact entry of ``key``."""
    view = memoryview(data)
    if not begins(data) or data[_DIGEST_END:_KEY_END].hex() != key:
        return None
    if hashlib.sha256(view[_DIGEST_END:]).digest() != data[len(_MAGIC) : _DIGEST_END]:
        return None
    return data[_KEY_END:]


def begins(data: bytes) -> bool:
    """Whether an entry can begin with ``data``, of at least BEGIN_BYTES."""
    return data[:BEGIN_BYTES] == _MAGIC
