"""Collectives, and the assignment of vision replicas to language replicas."""
