"""Around the optimizer's step.

What lives here: recorded losses, gradient norms, the guard, delayed unfreezing, rates of towers, warm-up.
"""
