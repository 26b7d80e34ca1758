"""Regular expressions of schemas, matched by RE2: the syntax of Go, and time linear in the text.

Owns: their bounds on length and memory.
Start reading at: `matches`.

Like `cel`, this is part of the process of `rule_worker`.
"""

from functools import lru_cache
from typing import Any

import re2

LIMIT_PATTERN = 16 << 10
_OPTIONS = re2.Options()
_OPTIONS.log_errors = False
_OPTIONS.max_mem = 1 << 20


class BadPattern(Exception):
    """The text is no regular expression, or a very large one; the message says which."""


@lru_cache(maxsize=128)
def compile_pattern(pattern: str) -> Any:
    """Raises BadPattern if RE2 does not accept the pattern."""
    if len(pattern) > LIMIT_PATTERN:
        raise BadPattern(f"the pattern is longer than {LIMIT_PATTERN} characters")
    try:
        return re2.compile(pattern, _OPTIONS)
    except (re2.error, UnicodeEncodeError) as error:
        why = error.args[0] if error.args else error
        raise BadPattern(why.decode(errors="replace") if isinstance(why, bytes) else str(error)) from error


def matches(pattern: str, text: str) -> bool:
    """Whether the pattern occurs in the text, anywhere unless it is anchored."""
    try:
        return compile_pattern(pattern).search(text) is not None
    except UnicodeEncodeError:
        return False
