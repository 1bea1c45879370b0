"""What every optimizer shares: parameters, options, agreement between ranks, the frame of a step."""
