"""Benchmarks are scripts beside each other, and import each other as such."""

import sys

from tests.forked import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
