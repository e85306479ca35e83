"""What a conversion has to do and the proof that it is complete, from headers alone."""
