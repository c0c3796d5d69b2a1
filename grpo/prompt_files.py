"""Prompts kept in files: a system part, a line `=== user ===`, a user part with fields like {{question}}."""

import re
from pathlib import Path
from typing import NamedTuple

USER_PART = "=== user ==="
FIELD = re.compile(r"\{\{(\w+)\}\}")


class PromptFile(NamedTuple):
    system: str
    user: str

    def messages(self, **texts: str) -> list[dict]:
        """Both parts with their fields filled in.

        In one pass: what a text holds is never taken for a field. And no text can close the tags that the template puts around it: a `<`
        before the name of a field becomes another sign.
        """
        tag = re.compile(rf"<(?=\s*/?\s*({'|'.join(texts)})\b)", re.IGNORECASE)
        parts = [("system", self.system), ("user", self.user)]
        return [{"role": role, "content": FIELD.sub(lambda field: tag.sub("‹", texts[field[1]]), part)} for role, part in parts]


def read_prompt(path: Path, required: set[str], optional: frozenset[str] = frozenset()) -> PromptFile:
    """ValueError names a file that cannot be read, has no user part, or lacks or has other fields than those given."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the template {path}: {error}") from error
    system, mark, user = text.partition(USER_PART)
    found = set(FIELD.findall(text))
    if not mark or required - found or found - required - optional:
        wanted = ", ".join(f"{{{{{name}}}}}" for name in sorted(required))
        others = f" (allowed too: {', '.join(sorted(optional))})" if optional else ""
        raise ValueError(f"{path}: a template has a system part, a line {USER_PART}, a user part, and the fields {wanted}{others}")
    return PromptFile(system.strip(), user.strip())
