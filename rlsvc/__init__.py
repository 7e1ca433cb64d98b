"""Train, sweep and serve robot policies on a Ray cluster."""

__version__ = "0.1.0"
