"""Conversations: our schema, and other people's turned into it."""
