"""Work with what others have made: DDP, loss scalers, torch.compile."""
