"""What surrounds training: config loading, launch guard, evaluation, output, reports."""
