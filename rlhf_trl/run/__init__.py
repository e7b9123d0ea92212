"""What surrounds training: config loading, launch guard, evaluation, output, reports."""

import os
import warnings

# Read when huggingface_hub is imported: TRL's telemetry stays off unless the user turns it on.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
# TRL 1.16 itself uses the old name of this field; a user cannot act on it.
warnings.filterwarnings("ignore", message=".*gradient_checkpointing` is deprecated")
