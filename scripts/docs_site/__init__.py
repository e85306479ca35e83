"""The documentation site: what of it is made from the code when it is built (`make docs`)."""
