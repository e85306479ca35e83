"""Metrics of a run: throughput, expert load, accuracy, learning rates, progress, trackers."""
