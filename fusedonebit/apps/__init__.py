"""Applications: train, lab, plan, migrate and report. They import what is public, and nothing imports them."""
