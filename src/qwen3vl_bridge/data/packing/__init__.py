"""Assignment of samples to rows: sizes, order, best fit, row plans, rows packed before training."""
