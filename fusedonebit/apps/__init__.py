"""Applications: train, plan and report, and the command line. They import what is public, and nothing imports them."""
