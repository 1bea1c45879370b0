"""What optimizers keep: declarations, and saving and loading, which follow from them."""
