"""Environments: gymnasium 1.x, one adapter a suite."""
