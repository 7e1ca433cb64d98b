"""Demonstrations in, batches out: readers, statistics, normalisation, windows. Imports no ray."""
