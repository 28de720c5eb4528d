"""Errors that end a run with one message and no traceback: exit status 2 where the input is wrong, else 1."""


class UserError(Exception):
    """What the user gave is wrong. The message names the place, the value, what is allowed and how to mend it."""


class DivergedError(Exception):
    """Training has no finite loss any more: one message, no traceback, exit status 1."""


class ConfigError(UserError):
    """The YAML file, a command-line override or a combination of sizes is wrong."""


class DataError(UserError):
    """A data set, a tokenizer or a model folder is missing or cannot be used as asked."""
