"""What surrounds training: config loading, launch guard, evaluation, output, reports."""

import logging
import os
import warnings

# Read when huggingface_hub is imported: TRL's telemetry stays off unless the user turns it on.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
# TRL 1.16 itself uses the old names of these methods; a user cannot act on it.
OLD_NAMES = "is_gradient_checkpointing|gradient_checkpointing_(en|dis)able"
warnings.filterwarnings("ignore", message=f"`({OLD_NAMES})` is deprecated")
# torchao tells of kernels that a machine lacks, and torch warns of its enumerations.
for library in ("bitsandbytes", "torchao"):
    logging.getLogger(library).setLevel(logging.ERROR)
ABOUT_ENUMS = "Calling register_constant() on Enum subclasses is deprecated"
logging.getLogger("torch.utils._pytree").addFilter(
    lambda record: ABOUT_ENUMS not in record.getMessage()
)
