"""Rows for a training loop: the dataset, batch streams, balance over ranks, worker processes."""
