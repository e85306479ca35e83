"""Around the optimizer's step.

What lives here: recorded losses, gradient norms, the guard, rates of towers, warm-up.
"""
