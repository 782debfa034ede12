"""Names of earlier versions and what replaced them, so that an old configuration is refused with the new name."""

MOVED_METHODS: dict[str, str] = {}
"""Old value of ``method`` → what to write instead, as the end of a sentence."""

MOVED_KEYS: dict[str, str] = {}
"""Old key → what to write instead, as the end of a sentence."""
