"""From a conversation to tensors: processor, tokens, encoding, filtering, collation."""
