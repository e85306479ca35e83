"""Plan of a conversion and the proof that it is complete, from only headers."""
