"""What joins runs: what was made from what, and what their folders hold."""
