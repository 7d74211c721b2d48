"""The two ways in which vocabularies write bytes: GPT-2's printable stand-ins and SentencePiece's `<0x0A>`."""

from __future__ import annotations

import re

_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]

BYTE_TO_CHARACTER = {byte: chr(byte) for byte in _PRINTABLE} | {b: chr(256 + n) for n, b in enumerate(_OTHERS)}
"""GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for characters from U+0100 on."""
_TO_LATIN1 = {ord(character): byte for byte, character in BYTE_TO_CHARACTER.items()}
_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a token in GPT-2's alphabet; a token with other characters stands for itself."""
    if all(ord(character) in _TO_LATIN1 for character in token):
        return token.translate(_TO_LATIN1).encode("latin-1")
    return token.encode("utf-8")


def sentencepiece_bytes(token: str) -> bytes:
    """Bytes of a SentencePiece token: `▁` is a space, `<0x0A>` one byte."""
    if match := _FALLBACK_BYTE.fullmatch(token):
        return bytes([int(match.group(1), 16)])
    return token.replace("▁", " ").encode("utf-8")
