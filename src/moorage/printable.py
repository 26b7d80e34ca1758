"""Make text from objects, drivers and files safe to show on a terminal or in a log line.

Owns: which characters never reach a terminal as they are, and how they are written instead. Everything that Unicode
calls not printable is escaped: control characters, ANSI and OSC sequences, bidirectional overrides, characters
without a width, lone surrogates.
Start reading at: `one_line`.
"""

import re
from typing import Final

LONGEST_LINE: Final = 2000
LONGEST_FIELD: Final = 8192

# Line and paragraph breaks, and the spaces that Unicode calls not printable.
_BREAKS = re.compile(r"[\t\n\v\f\r\x1c-\x1e\x85\u2028\u2029]+|[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")


def one_line(text: str, limit: int = LONGEST_LINE) -> str:
    """Return the text as one printable line. Line breaks become a space; overlong text is shortened."""
    text = shortened(text, limit)
    return text if text.isprintable() else escaped(_BREAKS.sub(" ", text))


def shortened(text: str, limit: int) -> str:
    """Return at most `limit` characters of the text, and how many are missing."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit} more characters)"


def many_lines(text: str, indent: str = "") -> str:
    """Return the text with its line breaks, each line indented; everything else that is not printable is escaped."""
    return "\n".join(indent + escaped(line.expandtabs()) for line in text.split("\n"))


def escaped(text: str) -> str:
    r"""Return the text with each character that is not printable written as in JSON: `\u001b`."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _escape(one) for one in text)


def _escape(character: str) -> str:
    number = ord(character)
    if number < 0x10000:
        return f"\\u{number:04x}"
    high, low = divmod(number - 0x10000, 0x400)
    return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"
