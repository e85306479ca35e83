"""Execution of a conversion: copying, journal, manifest, comparison, ranks, reports."""
