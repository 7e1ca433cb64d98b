"""Fuzzed messages, as benchmarks/decoder_fuzz.py sends them by the million: taken or refused, and nothing else."""

import importlib

import psutil
import pytest
from serving_fakes import serving

from rlsvc.runner import BaselineRunner


@pytest.fixture(scope="module")
def fuzz(root):
    """benchmarks/decoder_fuzz.py, which is a script and no part of the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root / "benchmarks")
        yield importlib.import_module("decoder_fuzz")


def test_fuzzed_messages_are_taken_or_refused_and_nothing_else(fuzz):
    tally, growth = fuzz.in_process(10_000, seed=0, say=print)
    assert not tally.crashes, tally.example
    assert min(tally.taken, tally.refused) > 1000
    assert growth < 50


def test_fuzzed_messages_over_sockets_are_never_answered_with_5xx(fuzz):
    with serving(BaselineRunner("zero", fuzz.CONTRACT), max_body_bytes=fuzz.MAX_BYTES) as url:
        tally, growth = fuzz.over_sockets(url, "fake", 1000, seed=1, replica=psutil.Process(), say=print)
    assert not tally.crashes, tally.example
    assert min(tally.taken, tally.refused) > 100
    assert growth < 50
