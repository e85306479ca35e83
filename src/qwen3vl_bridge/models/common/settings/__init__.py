"""A provider's fields, and the tables of what it refuses, by subject."""
