"""The frame that all optimizers share: parameters, options, agreement between ranks, the course of a step."""
