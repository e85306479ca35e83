"""Vision and language on ranks of their own: both modules, what they send each other, step, checkpoint, evaluation."""
