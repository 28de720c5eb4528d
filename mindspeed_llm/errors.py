"""Errors that are the user's to mend, told in one message without a traceback; of what was given, exit status 2."""


class UserError(Exception):
    """What the user gave is wrong. The message names the place, the value, what is allowed and how to mend it."""


class DivergedError(Exception):
    """Training has no finite loss any more: one message, no traceback, exit status 1."""


class ConfigError(UserError):
    """The YAML file, a command-line override or a combination of sizes is wrong."""


class DataError(UserError):
    """A data set, a tokenizer or a model folder is missing or cannot be used as asked."""
