"""Vision and language on ranks of their own: both modules, their payload, step, checkpoint, evaluation."""
