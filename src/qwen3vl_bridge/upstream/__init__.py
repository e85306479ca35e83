"""Mechanisms borrowed from other packages, one module for each.

Only modules of this package name private attributes of other packages, or replace functions of theirs. Each says what
it borrows, why, and when it can be deleted. They import nothing of ours but `lazy` and each other: what they call is
given to them.
"""
