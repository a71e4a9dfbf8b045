"""An entry of the disk cache, or of a bundle, as bytes: a magic number, the SHA-256 of what follows, the
key, the payload.
"""

from __future__ import annotations

import hashlib

_MAGIC = b"flashgen-cache-1\n"
_DIGEST_END = len(_MAGIC) + 32
_KEY_END = _DIGEST_END + 32


def pack(key: str, payload: bytes) -> bytes:
    """The bytes of an entry."""
    body = bytes.fromhex(key) + payload
    return _MAGIC + hashlib.sha256(body).digest() + body


def unpack(data: bytes, key: str) -> bytes | None:
    """The payload, or None if ``data`` is not an intact entry of ``key``."""
    view = memoryview(data)
    if data[: len(_MAGIC)] != _MAGIC or data[_DIGEST_END:_KEY_END].hex() != key:
        return None
    if hashlib.sha256(view[_DIGEST_END:]).digest() != data[len(_MAGIC) : _DIGEST_END]:
        return None
    return data[_KEY_END:]
