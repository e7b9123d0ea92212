"""What joins runs: a list of stages as one command, what was made from what, and the page."""
