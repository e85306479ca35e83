"""Building blocks of the weight table."""
