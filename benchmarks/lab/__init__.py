"""The convergence lab: real training tasks that fit a laptop, named optimizers, paired seeds."""
