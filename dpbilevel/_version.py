"""The version, for the package, its reports and its distribution."""

__version__ = "0.1.0"
