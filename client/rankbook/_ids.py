"""Unique tokens that sort by the time they were made."""

from __future__ import annotations

import secrets

from rankbook import _clock

__all__ = ["make_id", "new_id"]

# Crockford's base 32: no letter that is read as a digit.
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_CHARS = 26
_NOISE_BITS = 80


def make_id(unix_ms: int, noise: bytes) -> str:
    """The id of an instant and ten random bytes: 26 characters that sort by the instant."""
    number = (unix_ms << _NOISE_BITS) | int.from_bytes(noise[:10], "big")
    return "".join(_ALPHABET[(number >> (5 * place)) & 31] for place in reversed(range(_CHARS)))


def new_id() -> str:
    """A unique token for a generation, a boot_id or a lease key; later ones sort higher."""
    return make_id(int(_clock.unix_s() * 1000), secrets.token_bytes(10))
