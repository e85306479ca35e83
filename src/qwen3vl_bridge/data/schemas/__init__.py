"""Conversations: our schema, and conversion of other schemas to it."""
