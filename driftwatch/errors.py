"""The errors a user can act on. Each message is one line: what is wrong, where, and what to do."""

from __future__ import annotations


class DriftwatchError(Exception):
    """Base of all expected errors; the command line prints it as one line and exits with 2."""


class SettingsError(DriftwatchError):
    """A settings key is unknown, missing or has an impossible value."""


class RecordError(DriftwatchError):
    """A record does not follow the record format."""


class StoreError(DriftwatchError):
    """The store cannot be reached, is not migrated, or refuses a write."""


class ModelError(DriftwatchError):
    """A draft, target or tokenizer cannot be read, or does not fit the others."""


class ProfileError(DriftwatchError):
    """A cost profile cannot be read, or cannot say what it is asked for."""


class SketchError(DriftwatchError):
    """A sketch or its training data cannot be read or used, or belongs to another draft."""
