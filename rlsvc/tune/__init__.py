"""Sweeps: search spaces in YAML, searched by Ray Tune."""
