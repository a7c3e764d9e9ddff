"""The version, for the package, its reports and its distribution."""

__version__ = "0.1.0"
# The newest release of JAX that the tests passed with. pyproject.toml admits the
# releases of its minor version and of the next one.
TESTED_JAX = "0.12.0.1"
