"""A provider's fields, the tables of what it refuses, by subject, and which fields of a saved one travel."""
