"""The version, in one place: the build reads it from this file, and nothing is imported to find it."""

__version__ = "0.1.0"
