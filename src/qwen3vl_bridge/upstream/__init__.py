"""Mechanisms borrowed from other packages, one module for each.

Only modules of this package name private attributes of other packages, or replace functions of theirs. Each says what
it borrows, why, and when it can be deleted. From this project they import only `lazy` and each other; other functions
that they call are arguments.
"""
