"""The state of optimizers: its declaration, from which saving and loading follow."""
